"""LoRA adapters as tensors: reading, and merging into base weights.

The merged weight is `W + (alpha / r) · B @ A` (arXiv:2106.09685, section 4.1), for each expert of a fused parameter.
Adapters are PEFT folders: `adapter_config.json` and `adapter_model.safetensors`. Variants with another merge formula
are rejected by name, and so are tensors other than A and B of a layer: no part of an adapter is ignored silently.

Legend: E experts, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import ArtifactError
from components.json_text import read_json
from components.models.files import Weights
from components.models.stored_names import skeleton, to_files
from components.models.targets import adapted_parameters

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."
_A = ".lora_A.weight"
_OTHER_FORMULA = (
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "kasa_config", "layer_replication",
    "lora_bias", "modules_to_save", "monteclora_config", "rank_pattern", "trainable_token_indices",
    "use_bdlora", "use_dora", "use_qalora", "use_rslora", "velora_config",
)  # fmt: skip
"""PEFT options for which the merged weight is not `W + (alpha / r) · B @ A`."""
_OTHER_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Initializations that modify the base weights, so that the adapter does not fit the weights on disk."""


def merged_tensors(base_dir: Path, adapter_dir: Path, *, float32: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, merged weight) for each base weight that the adapter changes, under the names of the base's files:
    float32 sums in the base dtype, or unrounded (`float32`).

    Raises ArtifactError for an adapter that is not plain LoRA or does not fit the base model.
    """
    import torch

    config, adapter = _read_adapter(adapter_dir)
    model = skeleton(base_dir)
    parameters = adapted_parameters(model, config)
    scale = config["lora_alpha"] / config["r"]
    with Weights(base_dir) as base:

        def weight_of(stored: str, shape: torch.Size) -> torch.Tensor:
            weight = base.get(stored)
            if weight.shape != shape:
                raise ArtifactError(
                    f"{adapter_dir} does not fit {base_dir}: {stored} is {tuple(weight.shape)}, "
                    f"the adapter's update is {tuple(shape)}"
                )
            return weight

        for key in sorted(name for name in adapter if name.endswith(_A)):
            a_RI, b_OR = adapter[key].float(), adapter[key.replace(".lora_A.", ".lora_B.")].float()
            name, layer = _parameter(model, parameters, key.removeprefix(_PREFIX).removesuffix(_A), adapter_dir)
            experts = _experts(layer, name)
            if a_RI.ndim != 2 or b_OR.ndim != 2 or a_RI.shape[0] != b_OR.shape[1] or a_RI.shape[0] % (experts or 1):
                raise ArtifactError(
                    f"{adapter_dir} is no plain LoRA of linear layers: for {name}, A is {tuple(a_RI.shape)} and B is "
                    f"{tuple(b_OR.shape)}; expected (rank, inputs) and (outputs, rank)"
                    + (f", both times {experts} experts" if experts > 1 else "")
                )
            if not experts and not _is_transposed(layer) and name in base.where:
                weight = weight_of(name, torch.Size([len(b_OR), a_RI.shape[1]]))
                sums = {name: (torch.addmm(weight.float(), b_OR, a_RI, alpha=scale), weight.dtype)}
            else:
                updates = to_files(model, {name: _update(layer, experts, a_RI, b_OR)}, base.where.keys())
                weights = {stored: weight_of(stored, update.shape) for stored, update in updates.items()}
                sums = {
                    stored: (weight.float().add_(updates[stored], alpha=scale), weight.dtype)
                    for stored, weight in weights.items()
                }
            for stored, (merged, dtype) in sums.items():
                if not all(map(math.isfinite, torch.stack(merged.aminmax()).tolist())):  # one pass; NaN propagates
                    raise ArtifactError(f"{adapter_dir} is damaged: with it {stored} has values that are not finite")
                yield stored, merged if float32 else merged.to(dtype)


def _parameter(model: Any, parameters: dict[str, list[str]], path: str, adapter_dir: Path) -> tuple[str, Any]:
    """Return the name of the parameter that the layer `path` of an adapter changes, and the module that has it.

    PEFT wraps a module once for each of its adapted parameters: the last one is the outermost layer.
    """
    module, depth = path.replace(".base_layer", ""), path.count(".base_layer")
    try:
        key = parameters.get(module, ["weight"])[-1 - depth]
        model.get_parameter(f"{module}.{key}")
    except (AttributeError, IndexError):
        raise ArtifactError(f"{adapter_dir} does not fit: the base model has no layer {path}") from None
    return f"{module}.{key}", model.get_submodule(module)


def _experts(layer: Any, name: str) -> int:
    """Return the number of experts whose weights are joined in the parameter `name` of a layer; 0 for a matrix."""
    shape = layer.get_parameter(name.rpartition(".")[2]).shape
    return int(shape[0]) if len(shape) == 3 else 0


def _update(layer: Any, experts: int, a_RI: torch.Tensor, b_OR: torch.Tensor) -> torch.Tensor:
    """Return B @ A in the layout of the layer's parameter. Those of joined experts are (E·R, I) and (O, R·E)."""
    if experts:
        a_RI, b_OR = a_RI.unflatten(0, (experts, -1)), b_OR.unflatten(1, (-1, experts)).permute(2, 0, 1)
    update = b_OR @ a_RI
    return update.mT.contiguous() if _is_transposed(layer) else update


def _is_transposed(layer: Any) -> bool:
    """Return True for a weight that is stored as (inputs, outputs): that of Conv1D, and fused experts of some
    families."""
    return type(layer).__name__ == "Conv1D" or bool(getattr(layer, "is_transposed", False))


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
