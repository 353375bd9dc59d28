"""Union of the inference engines, which are the modules of `components.inference.engines`; and what other packages need
to start vLLM themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.inference.engine_spec import EngineSpec, ServerEnvironment
from components.inference.engines.embedded import EmbeddedSpec
from components.inference.vllm.launch import VLLM_PYTHON, flags, vllm_environment, vllm_on_cpu
from components.specs.declared import discover, union_of

__all__ = [
    "ENGINES",
    "VLLM_PYTHON",
    "EmbeddedSpec",
    "InferenceSpec",
    "ServerEnvironment",
    "flags",
    "vllm_environment",
    "vllm_on_cpu",
]

ENGINES = discover("components.inference.engines", EngineSpec)  # type: ignore[type-abstract]
"""Engines by name."""

if TYPE_CHECKING:
    InferenceSpec = EngineSpec
else:
    InferenceSpec = union_of(ENGINES.values())
