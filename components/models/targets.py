"""Layers of a model that have an adapter, under the names by which plain PEFT adapts the same ones.

`all-linear` adapts the language model only: linear layers and fused experts, without routers and the output head. The
vision tower of a multimodal model is never adapted. A list names layers by the end of their path (`q_proj`, `experts`,
`mlp.gate`) and may contain `all-linear`, so that `[all-linear, gate]` adds the routers.

transformers stores the experts of a layer as one parameter of three dimensions, which PEFT adapts as a parameter
(`target_parameters`). PEFT also reads names such as `gate_proj` in some families as the experts of transformers 4, so
linear layers of these names are named by their parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import ArtifactError, ResourceError
from components.models.layer_kinds import decoder
from components.models.stored_names import skeleton

if TYPE_CHECKING:
    import torch

    from components.models.spec import LoraSpec

ALL_LINEAR = "all-linear"
_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Families in which PEFT adapts no `out_proj`, because kernels read its weight without calling the layer."""

_READ_BY_MAMBA = "dt_proj"
"""Layer whose weight Mamba multiplies by itself, so that an adapter on it computes nothing."""


@dataclass(frozen=True)
class Targets:
    """Layers with an adapter, as arguments of PEFT's `LoraConfig`."""

    modules: list[str]
    """Linear layers: the end of their path if it names no other module, else the whole path."""
    parameters: list[str]
    """Parameters of other layers, named in the same way."""
    transposed: bool
    """True for linear layers that store their weight as (inputs, outputs), as GPT-2's do."""
    weights: frozenset[str]
    """Names of all adapted weights."""


def resolve(model: Any, lora: LoraSpec) -> Targets:
    """Return the layers of a transformers model that `lora` names. Raises ResourceError for a name without a layer, and
    for dropout on a parameter, which PEFT cannot compute."""
    body, experts, routers, head = _layers(model)
    linear = body | head
    selected = _selected(linear | experts | routers, body | experts, lora.target_modules)
    as_experts = _names_of_experts(model)
    modules = {name for name in selected & linear if name.rpartition(".")[2] not in as_experts}
    parameters = {f"{name}.weight" for name in selected & (linear | routers) - modules}
    for name in selected & experts:
        parameters |= {f"{name}.{key}" for key, value in _own(model.get_submodule(name)).items() if value.ndim == 3}
    if packed := sorted(name for name in parameters if not model.get_parameter(name).is_floating_point()):
        raise ResourceError(
            f"model.quantization: PEFT adapts {packed[0]} as a parameter, and cannot if it is stored in 4 bits "
            f"({len(packed)} such layers). Leave them out of model.lora.target_modules, or set model.quantization=none"
        )
    if parameters and lora.dropout:
        raise ResourceError(
            f"model.lora.dropout = {lora.dropout:g}: PEFT has no dropout for adapters of parameters such as "
            f"{min(parameters)}; expected 0, or model.lora.target_modules without them"
        )
    return Targets(
        _shortened(modules, (name for name, _ in model.named_modules()), 1),
        _shortened(parameters, (name for name, _ in model.named_parameters()), 2),
        any(type(model.get_submodule(name)).__name__ == "Conv1D" for name in modules),
        frozenset(parameters | {f"{name}.weight" for name in modules}),
    )


def check(base_dir: Path, lora: LoraSpec) -> None:
    """Raise ResourceError, as `resolve` does, for the model in `base_dir`."""
    if lora.target_modules != ALL_LINEAR or lora.dropout:
        resolve(skeleton(base_dir), lora)


def other_modules(model: Any) -> list[str]:
    """Return the names of the modules of a multimodal model that are not part of its language model, outermost only."""
    if model.config.get_text_config() is model.config:
        return []
    language = [decoder(model), model.get_output_embeddings()]
    shared = {name for name, module in model.named_modules() if any(part in language for part in module.modules())}
    inside = tuple(f"{name}." for name, module in model.named_modules() if module in language)
    others = [name for name, _ in model.named_modules() if name not in shared and not name.startswith(inside)]
    return [name for name in others if name.rpartition(".")[0] in shared]


def freeze_towers(model: Any) -> None:
    """Freeze what is not part of the language model of a multimodal model."""
    for name in other_modules(model):
        model.get_submodule(name).requires_grad_(False)


def adapted_parameters(model: Any, config: dict[str, Any]) -> dict[str, list[str]]:
    """Return the parameters that an adapter's config names in `target_parameters`, by module, in PEFT's order."""
    endings = tuple(f".{name}" for name in config.get("target_parameters") or ())
    by_module: dict[str, list[str]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if f".{name}".endswith(endings):
            module, _, key = name.rpartition(".")
            by_module.setdefault(module, []).append(key)
    return by_module


def names_of(config: dict[str, Any]) -> str | list[str]:
    """Return `model.lora.target_modules` of a saved adapter. Raises ArtifactError for an expression together with
    parameters, which a list of names cannot state."""
    modules, parameters = config["target_modules"] or [], config.get("target_parameters") or []
    if isinstance(modules, str) and parameters:
        raise ArtifactError(
            f"adapter_config.json: target_modules = {modules!r} with target_parameters = {parameters}; expected a list "
            "of names. List the adapted layers in target_modules"
        )
    return [*modules, *dict.fromkeys(name.rpartition(".")[0] for name in parameters)] if parameters else modules


def _layers(model: Any) -> tuple[set[str], set[str], set[str], set[str]]:
    """Return the names of the linear layers of the language model, of fused experts, of routers and of the output
    head."""
    import torch
    from transformers.pytorch_utils import Conv1D

    inside = {id(module) for module in decoder(model).modules()}
    named = {name: module for name, module in model.named_modules() if id(module) in inside}
    experts = {
        name
        for name, module in named.items()
        if name.endswith("experts") and any(value.ndim == 3 for value in _own(module).values())
    }
    blocks = {name.rpartition(".")[0] for name in named if name.endswith(".experts")}
    routers = {
        name
        for name, module in named.items()
        if _is_in_router(name.split("."), blocks) and "weight" in _own(module) and module.weight.ndim == 2
    }
    linear = {name for name, module in named.items() if isinstance(module, torch.nn.Linear | Conv1D)} - routers
    linear = {name for name in linear if not name.endswith(f".{_READ_BY_MAMBA}")}
    if model.config.model_type in _MAMBA:
        linear = {name for name in linear if not name.endswith(".out_proj")}
    head = {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
    return linear, experts, routers, head


def _is_in_router(path: list[str], blocks: set[str]) -> bool:
    return "router" in path or any(path[at] == "gate" and ".".join(path[:at]) in blocks for at in range(1, len(path)))


def _selected(layers: set[str], all_linear: set[str], wanted: str | list[str]) -> set[str]:
    if isinstance(wanted, str) and wanted != ALL_LINEAR:
        selected = {name for name in layers if re.fullmatch(wanted, name)}
        missing = [] if selected else [wanted]
    else:
        of_name = {
            name: all_linear if name == ALL_LINEAR else {layer for layer in layers if f".{layer}".endswith(f".{name}")}
            for name in ([wanted] if isinstance(wanted, str) else wanted)
        }
        selected = set().union(*of_name.values())
        missing = [name for name, names in of_name.items() if not names]
    if missing:
        ends = sorted({name.rpartition(".")[2] for name in layers})
        raise ResourceError(
            f"model.lora.target_modules: {', '.join(missing)} is no layer of this model that can have an adapter; "
            f"expected {ALL_LINEAR} or some of {', '.join(ends)}"
        )
    return selected


def _own(module: Any) -> dict[str, torch.nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _names_of_experts(model: Any) -> set[str]:
    """Return the names that PEFT takes for those of experts in transformers 4, whatever layer has them."""
    from peft.utils import transformers_weight_conversion as conversion

    family = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type, "")
    return set(conversion._MOE_TARGET_MODULE_MAPPING.get(family, ()))


def _shortened(names: set[str], existing: Iterable[str], parts: int) -> list[str]:
    """Return the last `parts` parts of each name if they name nothing else in the model, else the whole name."""

    def end(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    others = {end(name) for name in existing if name not in names}
    return sorted({name if end(name) in others else end(name) for name in names})
