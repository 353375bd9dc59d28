"""Names and layouts of a model's weights in its files, and in the loaded model.

transformers renames weights when it loads a model, and joins some: the experts of a layer are one parameter, and the
language model of a multimodal one has another prefix. Both directions are its own conversion, applied to single
weights of a model without memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import ArtifactError
from components.models.folder_limits import building, check_config

if TYPE_CHECKING:
    import torch


def skeleton(base_dir: Path) -> Any:
    """Return the model in `base_dir` in float32 and without its weights, on PyTorch's device `meta`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    check_config(base_dir)
    with building("the model of config.json", base_dir), torch.device("meta"):
        config = AutoConfig.from_pretrained(base_dir, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )


def without_memory(model: Any) -> Any:
    """Return a skeleton with weights on the CPU that are all one number in memory."""
    import torch

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False))
    return model


def to_files(model: Any, parameters: dict[str, torch.Tensor], stored: Set[str]) -> dict[str, torch.Tensor]:
    """Return parameters of a loaded model or a skeleton as the tensors of its files. stored: names in the files, which
    decide whether they are converted, because a model can also be saved under the names of its parameters."""
    from transformers.core_model_loading import revert_weight_conversion

    if parameters.keys() <= stored:
        return parameters
    if getattr(model, "_weight_conversions", None) is None:  # a skeleton; loading sets those that it has used
        model._weight_conversions = _conversions(model, stored)
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, parameters)
    return converted


def _conversions(model: Any, stored: Set[str]) -> list[Any]:
    """Return the conversions of a model with these names in its files: a change of prefix only if it changes one of
    them, because the language model of a multimodal model is also published alone."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    return [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(conversion, PrefixChange)
        or any(conversion.rename_source_key(name)[0] != name for name in stored)
    ]


def to_parameters(base_dir: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a model's files as parameters of the loaded model. All tensors that a parameter is joined from
    must be there. Raises ArtifactError for a tensor that the model does not have."""
    model = skeleton(base_dir)
    if tensors.keys() <= dict(model.named_parameters(remove_duplicate=False)).keys():
        return tensors
    return from_files(base_dir, model, tensors)


def from_files(base_dir: Path, model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same, and persistent buffers, in the dtypes of a model on `meta`, which stays there. Raises
    ArtifactError for a tensor that the model does not have."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    conversion = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))
    info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), conversion)
    if unknown := sorted(info.unexpected_keys):
        raise ArtifactError(f"the model in {base_dir} has no weights {unknown[:3]}, which were changed")
    loaded = {}
    for prefix, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and not tensor.is_meta:
                    loaded[f"{prefix}.{name}".removeprefix(".")] = tensor.detach()
                    empty = tensor.detach().to("meta")
                    own[name] = torch.nn.Parameter(empty) if isinstance(tensor, torch.nn.Parameter) else empty
    return loaded


def renamed(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Return the parameter or buffer of a model that each tensor of its files becomes: the first one of several."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping, own, names = get_model_conversion_mapping(model), model.state_dict(), {}
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    for name in sorted(stored, key=dot_natural_key):
        names[name], _ = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if names[name] not in own and name in own:
            names[name], _ = rename_source_key(name, [], [], model.base_model_prefix, own)
    return names
