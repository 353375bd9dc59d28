"""Full fine-tuning: all weights of the language model are trained.

The reference is a second copy of the weights, made on first use; while the reference computes, it takes the place of
the trained weights. Weights are saved under the names of the base model's own files and in the dtype of the model, so
that any reader of the base can read them (`models.trained_weights`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from components.algorithms.policy import sharded
from components.errors import ArtifactError, ResourceError
from components.models.files import write_tensors
from components.models.spec import ModelSpec
from components.models.stored_names import to_files, to_parameters
from components.models.targets import freeze_towers
from components.models.trained_weights import FILE, WEIGHTS, base_tensors, shapes

_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")


class FullFinetuning:
    """Trained weights of a policy as all weights of `model`, which was loaded from `base_dir`. Raises ResourceError if
    the files of the base use other names for the weights, because trained weights could not be written back."""

    folder = WEIGHTS

    def __init__(self, model: Any, spec: ModelSpec, base_dir: Path):
        self.model = model
        self._base_dir = base_dir
        self._reference: Path | None = None
        self._copy: dict[str, torch.Tensor] = {}
        self._parts: dict[str, torch.nn.Parameter] = {}
        self._reshard: Callable[..., None] = lambda: None
        self.has_trained_weights = True
        """False while some or all weights are those of the reference."""
        freeze_towers(model)
        self._dtypes = {name: parameter.dtype for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad_dtype = torch.float32  # summing gradients of many packs in bfloat16 would round each time
        stored = shapes(base_dir)
        self._stored = stored.keys()
        first_name = {parameter: name for name, parameter in model.named_parameters()}
        all_names = model.named_parameters(remove_duplicate=False)
        self._same = {name: first_name[parameter] for name, parameter in all_names if parameter.requires_grad}
        self._layers = list(_by_layer(self._same).values())
        """Names of the parameters of each layer, and of those outside of layers."""
        empty = {name: torch.empty_like(p, device="meta") for name, p in self.parameters.items()}
        written: dict[str, torch.Tensor] = {}
        for names in _by_layer(self.parameters).values():
            written |= to_files(model, {name: empty[name] for name in names}, self._stored)
        self._written = list(written)
        missing = [name for name, tensor in written.items() if stored.get(name) != tuple(tensor.shape)]
        if missing:
            raise ResourceError(
                f"model.lora=null: the files of {spec.name} contain no weight {missing[0]} of the model's shape "
                f"({len(missing)} such weights), so the trained weights could not be written back; expected "
                "model.lora with a rank"
            )

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by name; tied weights once."""
        return self._parts or {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def use_shards(self, reshard: Callable[..., None]) -> None:
        """Switch to weights that are sharded over several processes (`sharded`) and are not gathered. reshard: called
        before and after other weights take their place."""
        self._parts = self.parameters
        self._reshard = reshard

    def tensors(self, get: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under the names of the base model's files, a layer at a time; tied weights under each of
        their names. get: returns a parameter in a dtype."""
        parameters = self.parameters
        for names in self._layers:
            own = {self._same[name] for name in names}
            values = {name: get(parameters[name], self._dtypes[name]) for name in sorted(own)}
            of_layer = to_files(self.model, {name: values[self._same[name]] for name in names}, self._stored)
            yield from ((name, tensor) for name, tensor in of_layer.items() if name in self._stored)

    def load(self, folder: Path) -> None:
        """Load saved weights. Raises ArtifactError if they do not fit."""
        with torch.no_grad():
            self._read(folder, self.parameters)
        self._reshard()

    def save(self, folder: Path) -> None:
        """Write the weights, a layer at a time. Sharded weights are gathered in the first process, which writes, and
        all processes must call this."""
        first = not self._parts or not distributed.get_rank()
        if first:
            folder.mkdir(parents=True, exist_ok=True)
        like = dict(self.tensors(lambda tensor, dtype: torch.empty(tensor.shape, dtype=dtype, device="meta")))
        gathered = self.tensors(sharded.gather_to_first)
        write_tensors(folder / FILE if first else None, like, gathered, {"format": "pt"})

    def use_reference(self, folder: Path | None) -> None:
        """Set the reference: saved weights, or those of the base model if `folder` is None."""
        if folder != self._reference:
            self._copy = {}
        self._reference = folder

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Put the reference's weights in place within the context."""
        if not self._copy:
            copy = {name: torch.empty_like(parameter) for name, parameter in self.parameters.items()}
            if self._reference is None:
                self._fill(copy, dict(base_tensors(self._base_dir, self._written)), self._base_dir)
            else:
                self._read(self._reference, copy)
            self._copy = copy
        parameters = self.parameters
        if self._parts:
            self._reshard()
            with sharded.swap_values(parameters, self._copy):
                self.has_trained_weights = False
                try:
                    yield
                finally:
                    self._reshard()
                    self.has_trained_weights = True
            self._reshard(again=True)
            return
        trained = {name: parameter.data for name, parameter in parameters.items()}
        try:
            self.has_trained_weights = False
            for name, parameter in parameters.items():
                parameter.data = self._copy[name]
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = trained[name]
            self.has_trained_weights = True

    def release(self) -> None:
        """Free the reference's copy; it is recreated on the next use."""
        self._copy = {}

    def _read(self, folder: Path, into: Any) -> None:
        """Fill tensors by name with saved weights. Raises ArtifactError if they do not fit."""
        from safetensors.torch import load_file

        if not (folder / FILE).is_file():
            raise ArtifactError(
                f"{folder} contains no full weights, but model.lora=null trains all weights. Start from a checkpoint "
                "of full fine-tuning, or set model.lora with a rank"
            )
        self._fill(into, load_file(folder / FILE), folder)

    def _fill(self, into: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        tensors = to_parameters(self._base_dir, tensors)
        if any(name not in tensors or tensors[name].shape != into[name].shape for name in into):
            raise ArtifactError(
                f"the weights in {folder} belong to another model. Start from a checkpoint of this model"
            )
        for name, tensor in into.items():
            sharded.fill(tensor, tensors[name])


def _by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of parameters by layer; "" has those outside of layers."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.search(name)
        layers.setdefault(name[: match.end()] if match else "", []).append(name)
    return layers
