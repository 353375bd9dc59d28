"""What learns of a policy, where that are all weights of the model: full fine-tuning.

The reference is a second copy of the weights, made when it is first asked for; while it computes, it stands in their
place. What is saved are the weights under the names that the base model's own files give them, in the type in which the
model computes, so that whatever reads the base can read them (`models.learned`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from components.algorithms.policy import sharded
from components.errors import ArtifactError, ResourceError
from components.models.spec import ModelSpec
from components.models.trained_weights import FILE, WEIGHTS, base_tensors, shapes


class Whole:
    """All weights of `model`, which was read from `base_dir`. Raises ResourceError where they stand there under other
    names: what was learned could not be put back."""

    folder = WEIGHTS

    def __init__(self, model: Any, spec: ModelSpec, base_dir: Path):
        self.model = model
        self._base_dir = base_dir
        self._reference: Path | None = None
        self._copy: dict[str, torch.Tensor] = {}
        self._parts: dict[str, torch.nn.Parameter] = {}
        self._settle: Callable[..., None] = lambda: None
        self.itself = True
        """False while the weights are those of the reference, or some of them."""
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32  # gradients of many packs add up, in bfloat16 with an error each time
        stored = shapes(base_dir)
        self._names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name in stored]
        first = {parameter: name for name, parameter in model.named_parameters()}
        everywhere = model.named_parameters(remove_duplicate=False)
        self._same = {name: first[parameter] for name, parameter in everywhere}
        missing = [name for name, p in model.named_parameters() if stored.get(name) != tuple(p.shape)]
        if missing:
            raise ResourceError(
                f"model.lora=null: the files of {spec.name} hold no weight {missing[0]} of the shape that the model "
                f"has ({len(missing)} such in all), so that what is learned could not be put back into them; expected "
                "model.lora with a rank"
            )

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What learns, by name: tied weights once."""
        return self._parts or dict(self.model.named_parameters())

    def hold_in_parts(self, settle: Callable[..., None]) -> None:
        """The weights now lie in parts on several processes (`sharded`), and are not put together. settle: asked before
        and after others stand in their place."""
        self._parts = dict(self.model.named_parameters())
        self._settle = settle

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights under the names of the base model's files; tied ones under each of theirs. Those in parts are put
        together in the memory of the CPU; all processes ask for them."""
        named = self.parameters
        if not self._parts:
            return {name: named[self._same[name]].detach() for name in self._names}
        found = {name: sharded.whole(one).cpu() for name, one in named.items()}
        return {name: found[self._same[name]] for name in self._names}

    def load(self, folder: Path) -> None:
        """Takes saved weights. Raises ArtifactError where they do not fit."""
        with torch.no_grad():
            self._read(folder, self.parameters)
        self._settle()

    def save(self, folder: Path, gathered: dict[str, torch.Tensor] | None = None) -> None:
        """Writes the weights. gathered: what `tensors` gives."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.cpu().clone() for name, tensor in (gathered or self.tensors()).items()
        }  # tied ones are refused
        save_file(tensors, folder / FILE, metadata={"format": "pt"})

    def use_reference(self, folder: Path | None) -> None:
        """Chooses the reference: saved weights, or those of the base model where it is None."""
        if folder != self._reference:
            self._copy = {}
        self._reference = folder

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, the model computes what the reference would."""
        if not self._copy:
            copy = {name: torch.empty_like(parameter) for name, parameter in self.parameters.items()}
            if self._reference is None:
                for name, tensor in base_tensors(self._base_dir, list(copy)):
                    sharded.fill(copy[name], tensor)
            else:
                self._read(self._reference, copy)
            self._copy = copy
        parameters = self.parameters
        if self._parts:
            self._settle()
            with sharded.replaced(parameters, self._copy):
                self.itself = False
                try:
                    yield
                finally:
                    self._settle()
                    self.itself = True
            self._settle(again=True)
            return
        own = {name: parameter.data for name, parameter in parameters.items()}
        try:
            self.itself = False
            for name, parameter in parameters.items():
                parameter.data = self._copy[name]
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = own[name]
            self.itself = True

    def release(self) -> None:
        """Frees the copy; it is made again when it is asked for."""
        self._copy = {}

    def _read(self, folder: Path, into: Any) -> None:
        """Fills tensors by name with saved weights."""
        from safetensors.torch import load_file

        if not (folder / FILE).is_file():
            raise ArtifactError(
                f"{folder} holds no weights, and model.lora=null trains all of them. Start from a checkpoint of such a "
                "training, or give model.lora a rank"
            )
        tensors = load_file(folder / FILE)
        if any(name not in tensors or tensors[name].shape != into[name].shape for name in into):
            raise ArtifactError(
                f"the weights in {folder} are those of another model. Start from a checkpoint of this one"
            )
        for name, tensor in into.items():
            sharded.fill(tensor, tensors[name])
