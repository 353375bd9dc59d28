"""The embedded engine: transformers in the process of the stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from components.inference.engine_spec import EngineSpec
from components.inference.protocol import EngineHost, ModelEngine
from components.models.spec import ModelSpec

if TYPE_CHECKING:
    from components.inference.transformers.turns import Turns


class EmbeddedSpec(EngineSpec):
    """transformers, in the process of the stage."""

    name: Literal["embedded"] = "embedded"

    @property
    def in_process(self) -> bool:
        return True

    def key_part(self) -> dict[str, Any]:
        return {}  # the model determines the results

    def build(self, model: ModelSpec, host: EngineHost) -> ModelEngine:
        return self._engine(model, host)

    @property
    def serves_roles(self) -> bool:
        return True

    def build_roles(self, model: ModelSpec, host: EngineHost, roles: Sequence[str]) -> ModelEngine:
        from components.inference.role_engines import RoleEngines
        from components.inference.transformers.turns import Turns

        turns = Turns()
        return RoleEngines({role: self._engine(model, host, len(roles), turns) for role in roles})

    def _engine(self, model: ModelSpec, host: EngineHost, share: int = 1, turns: Turns | None = None) -> ModelEngine:
        """Return an engine. share: number of engines that share the memory of the cache."""
        from components.inference.transformers.engine import TransformersEngine, default_cache_bytes
        from components.models.weights import pick_device, prepare

        return TransformersEngine(
            prepare(model, host.cache),
            max_length=model.max_length,
            dtype=model.dtype,
            device=model.device,
            cache_bytes=default_cache_bytes(pick_device(model.device)) // share,
            turns=turns,
        )
