"""LoRA adapters as tensors: reading, and merging into base weights.

The merged weight is `W + (alpha / r) · B @ A` (arXiv:2106.09685, section 4.1). Adapters are PEFT folders:
`adapter_config.json` and `adapter_model.safetensors`. Variants with another merge formula are rejected by name, and so
are tensors other than A and B of a linear layer: no part of an adapter is ignored silently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import ArtifactError
from components.json_text import read_json
from components.models.files import Weights

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."
_OTHER_FORMULA = (
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "fan_in_fan_out", "kasa_config", "layer_replication",
    "lora_bias", "modules_to_save", "monteclora_config", "rank_pattern", "target_parameters", "trainable_token_indices",
    "use_bdlora", "use_dora", "use_qalora", "use_rslora", "velora_config",
)  # fmt: skip
"""PEFT options for which the merged weight is not `W + (alpha / r) · B @ A`."""
_OTHER_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Initializations that modify the base weights, so that the adapter does not fit the weights on disk."""


def merged_tensors(base_dir: Path, adapter_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, merged weight) for each base weight that the adapter changes: float32 sums in the base dtype.

    Raises ArtifactError for an adapter that is not plain LoRA or does not fit the base model.
    """
    import torch

    config, adapter = _read_adapter(adapter_dir)
    scale = config["lora_alpha"] / config["r"]
    with Weights(base_dir) as base:
        for key in sorted(name for name in adapter if name.endswith(".lora_A.weight")):
            name = key.removeprefix(_PREFIX).replace(".lora_A.weight", ".weight")
            a_RI, b_OR = adapter[key].float(), adapter[key.replace(".lora_A.", ".lora_B.")].float()
            weight_OI = base.get(name)
            if a_RI.ndim != 2 or b_OR.ndim != 2 or a_RI.shape[0] != b_OR.shape[1]:
                raise ArtifactError(
                    f"{adapter_dir} is no plain LoRA of linear layers: for {name}, A is {tuple(a_RI.shape)} and B is "
                    f"{tuple(b_OR.shape)}; expected (rank, inputs) and (outputs, rank)"
                )
            if weight_OI.shape != (b_OR.shape[0], a_RI.shape[1]):
                raise ArtifactError(
                    f"{adapter_dir} does not fit {base_dir}: {name} is {tuple(weight_OI.shape)}, "
                    f"the adapter's update is {(b_OR.shape[0], a_RI.shape[1])}"
                )
            merged = torch.addmm(weight_OI.float(), b_OR, a_RI, alpha=scale)
            if not all(map(math.isfinite, torch.stack(merged.aminmax()).tolist())):  # one pass; NaN propagates
                raise ArtifactError(f"{adapter_dir} is damaged: with it {name} has values that are not finite")
            yield name, merged.to(weight_OI.dtype)


def refuse_other_formulas(config: dict[str, Any], adapter_dir: Path) -> None:
    """Raise ArtifactError for a PEFT config whose update is not (alpha / r) · B @ A."""
    for option in _OTHER_FORMULA:
        if config.get(option):
            raise ArtifactError(f"{adapter_dir}: adapters with {option} cannot be merged here; use plain LoRA")
    if config.get("bias", "none") != "none":
        raise ArtifactError(f"{adapter_dir}: adapters with trained biases cannot be merged here; use plain LoRA")
    if str(config.get("init_lora_weights")).startswith(_OTHER_BASE):
        raise ArtifactError(
            f"{adapter_dir}: init_lora_weights={config['init_lora_weights']} changed the base weights, so the adapter "
            "cannot be merged into those on disk; convert it to plain LoRA with PEFT"
        )


def _read_adapter(adapter_dir: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config and tensors of a plain LoRA adapter. Raises ArtifactError for any other folder."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights = adapter_dir / "adapter_model.safetensors"
    if not (adapter_dir / "adapter_config.json").is_file() or not weights.is_file():
        raise ArtifactError(f"{adapter_dir} is no adapter: expected adapter_config.json and adapter_model.safetensors")
    try:
        config = read_json(adapter_dir / "adapter_config.json")
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{adapter_dir}: adapter_config.json cannot be read ({error!s:.200})") from None
    if not isinstance(config, dict):
        raise ArtifactError(f"{adapter_dir}: adapter_config.json holds no JSON object")
    if config.get("peft_type") != "LORA":
        raise ArtifactError(f"{adapter_dir} is an adapter of type {config.get('peft_type')}; only LoRA is merged here")
    refuse_other_formulas(config, adapter_dir)
    for name in ("lora_alpha", "r"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise ArtifactError(
                f"{adapter_dir}: adapter_config.json: {name} = {value!r:.100}: expected a number above 0"
            )
    try:
        adapter = load_file(weights)
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(f"{adapter_dir}: adapter_model.safetensors cannot be read ({error!s:.200})") from None
    stems = [name.removesuffix(".lora_A.weight") for name in adapter if name.endswith(".lora_A.weight")]
    expected = {f"{stem}.lora_{part}.weight" for stem in stems for part in "AB"}
    if odd := sorted(expected ^ set(adapter)):
        raise ArtifactError(f"{adapter_dir} is no plain LoRA of linear layers: missing or unknown are {odd[:3]}")
    return config, adapter
