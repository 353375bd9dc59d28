"""The embedded engine: transformers in the process of the stage.

With an adapter for each role of the episodes (`model.lora.roles`), each role has an engine of its own with the weights
of its adapter, so each has its own cache of prefixes: keys and values that one adapter computed are never read under
another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from components.errors import ArtifactError, Problem, SpecError
from components.inference.engine_spec import EngineSpec, Speed
from components.inference.protocol import ChatCompletion, ChatRequest, EngineHost, ModelEngine
from components.models.spec import ModelSpec
from components.models.trained_weights import role_folders

if TYPE_CHECKING:
    from components.inference.transformers.turns import Turns


class EmbeddedSpec(EngineSpec):
    """transformers, in the process of the stage."""

    name: Literal["embedded"] = "embedded"

    @property
    def in_process(self) -> bool:
        return True

    def speed(self, root: Path, *, gpu: bool) -> Speed | None:
        return Speed(0.0, 1100.0 if gpu else 127.0)

    def key_part(self) -> dict[str, Any]:
        return {}  # the model determines the results

    def build(self, model: ModelSpec, host: EngineHost) -> ModelEngine:
        return self._engine(model, host)

    @property
    def serves_roles(self) -> bool:
        return True

    @property
    def ends_reasoning(self) -> bool:
        return True

    @property
    def completes_responses(self) -> bool:
        return True

    def build_roles(self, model: ModelSpec, host: EngineHost, roles: Sequence[str]) -> ModelEngine:
        from components.inference.transformers.turns import Turns

        turns = Turns()
        return RoleEngines({role: self._engine(model, host, len(roles), turns) for role in roles})

    def _engine(self, model: ModelSpec, host: EngineHost, share: int = 1, turns: Turns | None = None) -> ModelEngine:
        """Return an engine. share: number of engines that share the memory of the cache."""
        from components.inference.transformers.engine import TransformersEngine
        from components.inference.transformers.state_batch import default_cache_bytes
        from components.models.weights import pick_device, prepare

        return TransformersEngine(
            prepare(model, host.cache),
            max_length=model.max_length,
            dtype=model.dtype,
            device=model.device,
            cache_bytes=default_cache_bytes(pick_device(model.device)) // share,
            turns=turns,
            cuda_graphs=model.cuda_graphs,
        )


class RoleEngines:
    """An engine that passes each request to the engine of its `agent`; implements
    `components.inference.protocol.ModelEngine`. engines: by role."""

    def __init__(self, engines: Mapping[str, ModelEngine]):
        self.engines = dict(engines)

    @property
    def policy(self) -> str:
        return next(iter(self.engines.values())).policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the response of the role's adapter. Raises SpecError for an agent without one."""
        engine = self.engines.get(request.agent)
        if engine is None:
            text = (
                f"{', '.join(self.engines)}: the agent {request.agent!r} has no adapter; expected the names of all "
                "agents that ask the policy, or null for one adapter"
            )
            raise SpecError([Problem("model.lora.roles", text)])
        return await engine.chat(request)

    def load_policy(self, version: str, folder: str | None) -> None:
        """Load `version`: the adapter of each role in `folder`, or the base model if it is None. Raises ArtifactError
        for adapters of other roles."""
        saved = role_folders(Path(folder)) if folder is not None else {}
        if folder is not None and set(saved) != set(self.engines):
            raise ArtifactError(
                f"{folder} holds adapters of {', '.join(saved) or 'no roles'}; expected those of "
                f"{', '.join(self.engines)}"
            )
        for role, engine in self.engines.items():
            engine.load_policy(version, str(saved[role]) if folder is not None else None)

    def release(self) -> None:
        for engine in self.engines.values():
            engine.release()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
