"""Language model whose weights are read from its files where they are needed, a part at a time.

A model in sharded training never is in one process as a whole. transformers builds it from tensors without content,
which decide on names, dtypes, ties and buffers. Then a placeholder takes the place of each weight: a tensor of its
shape, dtype and device with a single number in memory, so that code that does not compute with it, such as PEFT, cannot
tell. `fill` reads the weights of a module; `computing` has those of one layer in memory at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from components.errors import ArtifactError
from components.models import fused_norms
from components.models.attention import implementation
from components.models.files import Weights
from components.models.folder_limits import building, check_config, check_loaded
from components.models.layer_kinds import decoder
from components.models.stored_names import from_files, renamed, skeleton
from components.models.trained_weights import shapes
from components.models.weights import model_config

_Place = tuple[dict[str, Any], str]
"""Parameters or buffers of a module, and a name in them."""


class StreamedModel:
    """Causal language model in `base_dir` with placeholders for all weights, in evaluation mode. trained: folder with
    weights that take the place of those in `base_dir` (`trained_weights`). Raises ResourceError if the files lack
    weights of the config."""

    def __init__(self, base_dir: Path, *, dtype: str, device: str, trained: Path | None = None):
        self._base_dir = base_dir
        self._folders = [base_dir, *([trained] if trained else [])]
        self._device = device
        self.model = _without_weights(base_dir, dtype)
        """The model; adapters may be added, and filled modules sharded."""
        self._bare = copy.deepcopy(self.model)
        with Weights(base_dir) as weights:
            self._parameters = renamed(self._bare, weights.where)
        self._tie_equal_weights()
        _initialize_buffers(self.model, device)
        self._names: dict[torch.Tensor, list[str]] = {}
        """Names of each placeholder; those of tied weights."""
        self._put_placeholders()
        if self.model.device.type == "cuda":
            fused_norms.fuse(self.model)
            torch.backends.cuda.enable_cudnn_sdp(False)  # as `load_model`

    def fill(self, module: torch.nn.Module) -> None:
        """Read the weights of a module that are still placeholders. Weights of other modules that are tied to them keep
        theirs."""
        self._fill(self._places(module.modules()))

    @contextmanager
    def computing(self, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Compute with the weights within the context: a layer's are read before its forward pass and dropped after it,
        those outside of layers are there until the end. dtype: of weights in half precision; None: their own."""
        layers = list(getattr(decoder(self.model), "layers", ()))
        inside = {part for layer in layers for part in layer.modules()}
        filled: dict[torch.nn.Module, dict[torch.Tensor, list[_Place]]] = {}

        def enter(layer: torch.nn.Module, *_: Any) -> None:
            filled[layer] = self._fill(self._places(layer.modules()), dtype)

        def leave(layer: torch.nn.Module, *_: Any) -> None:
            _put(filled.pop(layer))

        hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
        hooks += [layer.register_forward_hook(leave, always_call=True) for layer in layers]
        outside = self._fill(self._places(part for part in self.model.modules() if part not in inside), dtype)
        try:
            yield
        finally:
            _put(outside)
            for hook in hooks:
                hook.remove()

    def _places(self, modules: Iterable[torch.nn.Module]) -> dict[torch.Tensor, list[_Place]]:
        """Return the placeholders in modules, with their places."""
        places: dict[torch.Tensor, list[_Place]] = {}
        for module in modules:
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and tensor in self._names:
                        places.setdefault(tensor, []).append((tensors, name))
        return places

    def _fill(
        self, places: dict[torch.Tensor, list[_Place]], dtype: torch.dtype | None = None
    ) -> dict[torch.Tensor, list[_Place]]:
        """Put weights in place of placeholders, and return these."""
        read = self._read([name for placeholder in places for name in self._names[placeholder]])
        for placeholder, at in places.items():
            names = [name for name in self._names[placeholder] if name in read]
            if not names or read[names[0]].shape != placeholder.shape:
                raise ArtifactError(
                    f"the files in {self._base_dir} do not have {self._names[placeholder][0]} by itself; set "
                    "strategy ddp, or save the model with the names of transformers"
                )
            weight = read[names[0]].to(self._device, placeholder.dtype, copy=True)  # the files' memory is let go
            if dtype is not None and placeholder.dtype in (torch.bfloat16, torch.float16):
                weight = weight.to(dtype)
            is_parameter = isinstance(placeholder, torch.nn.Parameter)
            _put({torch.nn.Parameter(weight, placeholder.requires_grad) if is_parameter else weight: at})
        return places

    def _read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return parameters and buffers as they are in the files, by name."""
        wanted = set(names)
        stored: dict[str, torch.Tensor] = {}
        for folder in self._folders:
            with Weights(folder) as weights:
                files = [file for file, name in self._parameters.items() if name in wanted and file in weights.where]
                stored |= {file: weights.get(file) for file in files}
        return from_files(self._base_dir, self._bare, stored)

    def _tie_equal_weights(self) -> None:
        """Tie weights that the config ties if the files have both and they are equal, as transformers does."""
        for pair in self.model.all_tied_weights_keys.items():
            if self.model.get_parameter(pair[0]) is not self.model.get_parameter(pair[1]):
                first, second = (self._read([name])[name] for name in pair)
                if torch.equal(first, second):
                    self.model.tie_weights()

    def _put_placeholders(self) -> None:
        places: dict[torch.Tensor, list[_Place]] = {}
        names: dict[torch.Tensor, list[str]] = {}
        for prefix, module in self.model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta:
                        places.setdefault(tensor, []).append((tensors, name))
                        names.setdefault(tensor, []).append(f"{prefix}.{name}".removeprefix("."))
        for tensor, at in places.items():
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            number = torch.zeros((), dtype=tensor.dtype, device=self._device).expand(tensor.shape)
            value = number if tensor.ndim > 1 else number.clone()  # vectors may be written to
            placeholder = torch.nn.Parameter(value, tensor.requires_grad) if is_parameter else value
            self._names[placeholder] = names[tensor]
            _put({placeholder: at})


def _put(tensors: dict[torch.Tensor, list[_Place]]) -> None:
    for tensor, places in tensors.items():
        for owner, name in places:
            owner[name] = tensor


def _without_weights(base_dir: Path, dtype: str) -> Any:
    """Return the model with all weights and buffers on `meta`, as transformers loads it."""
    check_config(base_dir)
    config = model_config(base_dir)
    kind = type(skeleton(base_dir))
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes(base_dir).items()}
    with building("the model of config.json", base_dir):
        model, loading = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            device_map="meta",
            dtype=getattr(torch, dtype),
            attn_implementation=implementation(config),
            output_loading_info=True,
        )
    check_loaded(loading, base_dir)
    model.config.name_or_path = str(base_dir)
    return model.eval()


def _initialize_buffers(model: Any, device: str) -> None:
    """Compute the buffers that the files do not have, such as rotary frequencies, as transformers does after it has
    loaded the weights."""
    for module in model.modules():
        module._is_hf_initialized = False
    model._move_missing_keys_from_meta_to_device(set(), None, None, None)
    model.initialize_weights()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
