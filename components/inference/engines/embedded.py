"""The embedded engine: transformers in the process of the stage."""

from __future__ import annotations

from typing import Any, Literal

from components.inference.engine_spec import EngineSpec
from components.inference.protocol import EngineHost, ModelEngine
from components.models.spec import ModelSpec


class EmbeddedSpec(EngineSpec):
    """transformers, in the process of the stage."""

    name: Literal["embedded"] = "embedded"

    @property
    def in_process(self) -> bool:
        return True

    def key_part(self) -> dict[str, Any]:
        return {}  # the model determines the results

    def build(self, model: ModelSpec, host: EngineHost) -> ModelEngine:
        from components.inference.transformers.engine import TransformersEngine
        from components.models.weights import prepare

        base_dir = prepare(model, host.cache)
        return TransformersEngine(base_dir, max_length=model.max_length, dtype=model.dtype, device=model.device)
