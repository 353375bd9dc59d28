"""Trained weights of a policy as a LoRA adapter (arXiv:2106.09685) on a frozen base model.

The reference is the same model with the adapter disabled, or with a second, frozen adapter in its place, so no second
copy of the base is in memory.
"""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from components.errors import ArtifactError, ResourceError
from components.json_text import read_json
from components.models.fused_lora import fuse
from components.models.lora import refuse_other_formulas
from components.models.spec import LoraSpec, ModelSpec
from components.models.stored_names import skeleton, to_files, without_memory
from components.models.targets import Targets, resolve
from components.models.trained_weights import ADAPTER, shapes

LEARNING, REFERENCE = "default", "reference"


class Adapter:
    """LoRA adapter on `model`, which it modifies in place. A is drawn from `seed` and B is zero, so the model's outputs
    are unchanged at first. names: PEFT's names of the trained adapters, of which the first is active."""

    folder = ADAPTER
    has_trained_weights = True
    """True: other weights never take the place of the trained ones, even while the reference computes."""

    def __init__(self, model: Any, spec: ModelSpec, seed: int, names: Sequence[str] = (LEARNING,)):
        from peft import LoraConfig, get_peft_model

        assert spec.lora is not None
        self._lora, self._name = spec.lora, spec.name
        self._reference: Path | None = None
        self.names = tuple(names)
        targets = resolve(model, self._lora)
        self._arguments = _peft_arguments(self._lora, targets)
        self._weights = targets.weights
        torch.manual_seed(seed)
        self.model = get_peft_model(model, LoraConfig(**self._arguments), adapter_name=names[0])
        for name in names[1:]:
            self.model.add_adapter(name, LoraConfig(**self._arguments))
        if model.device.type == "cuda":
            fuse(self.model)

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters of the active adapter, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def tensors(self, name: str = LEARNING) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors under PEFT's names."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self.model, adapter_name=name, save_embedding_layers=False)

    def load(self, folder: Path, name: str = LEARNING) -> None:
        """Load the tensors of a saved adapter. Raises ArtifactError if they do not fit."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        if not (folder / "adapter_config.json").is_file():
            raise ArtifactError(
                f"{folder} contains no adapter, but model.lora is set. Start from a checkpoint of a LoRA training, "
                "or set model.lora=null"
            )
        saved = read_json(folder / "adapter_config.json")
        refuse_other_formulas(saved, folder)
        if saved["r"] != self._lora.rank or saved["lora_alpha"] != self._lora.alpha:
            raise ArtifactError(
                f"the adapter in {folder} has rank {saved['r']} and alpha {saved['lora_alpha']:g}, but model.lora has "
                f"rank {self._lora.rank} and alpha {self._lora.alpha:g}. Set model.lora to the adapter's values, or "
                "start without the adapter"
            )
        tensors = load_file(folder / "adapter_model.safetensors")
        own_tensors = self.tensors(name)
        if set(own_tensors) != set(tensors) or any(own_tensors[key].shape != tensors[key].shape for key in own_tensors):
            raise ArtifactError(
                f"the adapter in {folder} does not fit: it is for another model or for other layers than "
                f"model.lora.target_modules={self._lora.target_modules}. Start from an adapter of this model, or "
                "without an adapter"
            )
        set_peft_model_state_dict(self.model, tensors, adapter_name=name)

    def save(self, folder: Path, name: str = LEARNING) -> None:
        """Write a PEFT folder. It contains the name of the base and of the layers, but no path, so that it works on any
        machine."""
        from peft import LoraConfig
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in self.tensors(name).items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        base = Path(self._name)
        config = LoraConfig(**self._arguments, base_model_name_or_path=base.name if base.is_dir() else self._name)
        text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted)
        (folder / "adapter_config.json").write_text(text + "\n")

    def check_base(self, base_dir: Path) -> None:
        """Raise ResourceError if an adapter of this model could not be merged into the files of the base, or not be
        read by plain PEFT."""
        stored = shapes(base_dir)
        if self._weights <= stored.keys():
            return
        model = skeleton(base_dir)
        for name in sorted(self._weights):
            files = to_files(model, {name: model.get_parameter(name).detach()}, stored.keys())
            if wrong := [file for file, tensor in files.items() if stored.get(file) != tuple(tensor.shape)]:
                raise ResourceError(
                    f"model.lora.target_modules: an adapter of {name} cannot be merged into the model's files, which "
                    f"hold {wrong[0]} as {stored.get(wrong[0], 'no tensor of its own')}. Name other layers"
                )
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder))
            try:
                self.check_saved(Path(folder), base_dir)
            except ArtifactError as error:
                raise ResourceError(str(error).removeprefix(f"{folder}: ")) from None

    def check_saved(self, folder: Path, base_dir: Path, name: str = LEARNING) -> None:
        """Raise ArtifactError unless plain PEFT, which gets the base model and a folder of `save`, adapts the same
        layers with the same values."""
        from peft import PeftModel, get_peft_model_state_dict

        fresh = PeftModel.from_pretrained(without_memory(skeleton(base_dir)), folder, low_cpu_mem_usage=True)
        tensors, loaded = self.tensors(name), get_peft_model_state_dict(fresh, save_embedding_layers=False)
        differing = tensors.keys() ^ loaded.keys()
        differing |= {
            key
            for key in tensors.keys() & loaded.keys()
            if loaded[key].is_meta or not torch.equal(tensors[key].cpu(), loaded[key])
        }
        scales, loaded_scales = _scales(self.model, name), _scales(fresh, fresh.active_adapter)
        differing |= {layer for layer in scales.keys() | loaded_scales if scales.get(layer) != loaded_scales.get(layer)}
        if differing:
            raise ArtifactError(
                f"{folder}: PEFT reads another adapter than was trained: {min(differing)} differs, and "
                f"{len(differing) - 1} more. Leave these layers out of model.lora.target_modules"
            )

    def use_reference(self, folder: Path | None) -> None:
        """Set the reference: a saved adapter, or the base model if `folder` is None."""
        if folder is not None:
            self._load_frozen(folder, REFERENCE)
            self.model.set_adapter(LEARNING)
        self._reference = folder

    def _load_frozen(self, folder: Path, name: str) -> None:
        """Load a saved adapter under a name of its own, without training it."""
        from peft import LoraConfig

        if name not in self.model.peft_config:
            self.model.add_adapter(name, LoraConfig(**self._arguments, inference_mode=True))
        self.load(folder, name)

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Activate the reference within the context."""
        if self._reference is None:
            with self.model.disable_adapter():
                yield
        else:
            self.model.set_adapter(REFERENCE)
            try:
                yield
            finally:
                self.model.set_adapter(LEARNING)

    def release(self) -> None:
        """Free the reference's memory; an adapter has no copy to free."""

    def copy_to(self, name: str) -> None:
        """Add or overwrite another adapter on the same base with a copy of the trained one."""
        from peft import LoraConfig, set_peft_model_state_dict

        if name not in self.model.peft_config:
            self.model.add_adapter(name, LoraConfig(**self._arguments))
            self.model.set_adapter(LEARNING)
        set_peft_model_state_dict(self.model, self.tensors(), adapter_name=name)

    def beside(self, lora: LoraSpec, seed: int, name: str, base_dir: Path) -> Adapter:
        """Return another adapter on the same base, with a rank and layers of its own, under the PEFT name `name`."""
        from peft import LoraConfig

        other = copy.copy(self)
        targets = resolve(skeleton(base_dir), lora)
        other._lora, other.names, other._weights = lora, (name,), targets.weights
        other._arguments = _peft_arguments(lora, targets)
        torch.manual_seed(seed)
        self.model.add_adapter(name, LoraConfig(**other._arguments))
        self.model.set_adapter(self.names[0])
        return other

    @contextlib.contextmanager
    def activate(self, name: str) -> Iterator[dict[str, torch.nn.Parameter]]:
        """Activate another adapter within the context, for the forward pass and for training. Yield its parameters by
        name. PEFT computes gradients only for the active adapter, so backward passes belong inside the context."""
        self.model.set_adapter(name)
        try:
            yield self.parameters
        finally:
            self.model.set_adapter(LEARNING)


def _scales(model: Any, name: str) -> dict[str, float]:
    """Return the factor of the update of each layer that has the adapter `name`."""
    scalings = {layer: getattr(module, "scaling", {}) for layer, module in model.named_modules()}
    return {
        layer: scaling[name] for layer, scaling in scalings.items() if isinstance(scaling, dict) and name in scaling
    }


def _peft_arguments(lora: LoraSpec, targets: Targets) -> dict[str, Any]:
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets.modules,
        "target_parameters": targets.parameters or None,
        "fan_in_fan_out": targets.transposed,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
