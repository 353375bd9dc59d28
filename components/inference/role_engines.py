"""Engines of a policy with an adapter for each role of the episodes (`model.lora.roles`).

Each role has an engine of its own with the weights of its adapter, so each has its own cache of prefixes: keys and
values that one adapter computed are never read under another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from components.errors import ArtifactError, Problem, SpecError
from components.inference.protocol import ChatCompletion, ChatRequest, ModelEngine
from components.models.trained_weights import role_folders


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
