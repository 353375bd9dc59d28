"""Adapters that vLLM applies whole, by the source of version 0.32.

vLLM ignores tensors that have no layer of their name, so a family whose layers have other names there would be sampled
without a part of the policy. Joined experts are read as PEFT writes them by a server with
`--enable-mixed-moe-lora-format`, if the request to load them says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.errors import ResourceError
from components.json_text import read_json
from components.models.files import read_settings
from components.models.spec import ModelSpec
from components.models.targets import ALL_LINEAR, names_of
from components.models.trained_weights import shapes

MIXED_FORMAT = "enable-mixed-moe-lora-format"
"""Option of a server that loads adapters of joined experts."""
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SAME_NAMES = {
    "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe",
    "gpt_oss",
}  # fmt: skip
"""Families whose experts and routers have the same names in transformers and vLLM."""


def has_experts(base_dir: Path) -> bool:
    """Return True for a mixture of experts."""
    config = _text_config(base_dir)
    return any(config.get(name) for name in _NUMBERS_OF_EXPERTS)


def joins_experts(folder: Path) -> bool:
    """Return True for an adapter whose experts are joined."""
    parameters = read_json(folder / "adapter_config.json").get("target_parameters") or ()
    return any(".experts." in f".{name}" for name in parameters)


def check_adapter(base_dir: Path, folder: Path) -> None:
    """Raise ResourceError if vLLM would leave out a part of a saved adapter."""
    check_layers(base_dir, names_of(read_json(folder / "adapter_config.json")))


def check_layers(base_dir: Path, names: str | list[str]) -> None:
    """Raise ResourceError if vLLM would leave out the adapters of some layers. names: `model.lora.target_modules`."""
    config, names = _text_config(base_dir), [names] if isinstance(names, str) else names
    family, ends = config.get("model_type"), {name.rpartition(".")[2] for name in names}
    if has_experts(base_dir) and family not in _SAME_NAMES and ends & {ALL_LINEAR, "experts", "gate", "router"}:
        problem = f"leaves out, or is not known to apply, adapters of the experts and routers of {family}"
    elif config.get("kv_lora_rank") and ends & {ALL_LINEAR, "kv_b_proj"}:
        problem = "leaves out kv_b_proj of latent attention, which it multiplies into other weights when it starts"
    else:
        return
    raise ResourceError(
        f"model.lora.target_modules = {', '.join(names)}: vLLM 0.32 {problem}. Name other layers, such as "
        "[q_proj, o_proj], or set inference=embedded"
    )


def check_weights(base_dir: Path, folder: Path) -> None:
    """Raise ResourceError for trained weights without some of the model, such as those of its vision tower: vLLM reads
    a model from one folder."""
    if missing := sorted(shapes(base_dir).keys() - shapes(folder).keys()):
        raise ResourceError(
            f"{folder} lacks {len(missing)} weights of the model, such as {missing[0]}, which full fine-tuning does "
            "not train: vLLM reads all weights from one folder. Set model.lora with a rank, or inference=embedded"
        )


def check_heads(base_dir: Path, ranks: object) -> None:
    """Raise ResourceError if the attention heads cannot be divided among `ranks` tensor-parallel ranks, as vLLM's
    `ModelConfig.verify_with_parallel_config` demands."""
    heads = _text_config(base_dir).get("num_attention_heads")
    if isinstance(heads, int) and isinstance(ranks, int) and ranks > 0 and heads % ranks:
        divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ResourceError(
            f"inference.arguments.tensor-parallel-size = {ranks}: the model has {heads} attention heads; expected one "
            f"of {divisors}, or data-parallel-size={ranks} for as many copies of the model"
        )


def check_dtype(model: ModelSpec) -> None:
    """Raise ResourceError for an adapter that vLLM's kernels on a GPU refuse: `lora_shrink_op` asserts 16 bits."""
    if model.lora is not None and model.dtype == "float32":
        raise ResourceError(
            "model.dtype = float32: vLLM computes LoRA adapters on a GPU in 16 bits only; expected bfloat16, auto, or "
            "inference=embedded for float32"
        )


def _text_config(base_dir: Path) -> Mapping[str, Any]:
    config = read_settings(base_dir / "config.json")
    return config.get("text_config") or config
