"""What learns of a policy, where that is a LoRA adapter (arXiv:2106.09685) on a base model that stays as it is.

The reference is the same model with its adapter off, or with a second, frozen adapter in its place, so no second copy
of the base is held.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from components.errors import ArtifactError
from components.json_text import read_json
from components.models.lora import refuse_other_formulas
from components.models.spec import LoraSpec, ModelSpec
from components.models.trained_weights import ADAPTER

LEARNING, REFERENCE = "default", "reference"


class Adapter:
    """On `model`, which it changes: A random from `seed`, B zero, so that what the model computes stays the same."""

    folder = ADAPTER
    itself = True
    """What learns is never another's, whoever computes."""

    def __init__(self, model: Any, spec: ModelSpec, seed: int):
        from peft import LoraConfig, get_peft_model

        assert spec.lora is not None
        self._lora, self._name = spec.lora, spec.name
        self._reference: Path | None = None
        torch.manual_seed(seed)
        self.model = get_peft_model(model, LoraConfig(**_peft_arguments(self._lora)), adapter_name=LEARNING)

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What learns, by name: of the adapter in use."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def tensors(self, name: str = LEARNING) -> dict[str, torch.Tensor]:
        """The adapter's tensors under PEFT's names."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self.model, adapter_name=name)

    def load(self, folder: Path, name: str = LEARNING) -> None:
        """Takes the tensors of a saved adapter. Raises ArtifactError where they do not fit."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        if not (folder / "adapter_config.json").is_file():
            raise ArtifactError(
                f"{folder} holds no adapter, and model.lora asks for one. Start from a checkpoint of a LoRA training, "
                "or say model.lora=null"
            )
        saved = read_json(folder / "adapter_config.json")
        refuse_other_formulas(saved, folder)
        if saved["r"] != self._lora.rank or saved["lora_alpha"] != self._lora.alpha:
            raise ArtifactError(
                f"the adapter in {folder} has rank {saved['r']} and alpha {saved['lora_alpha']:g}, model.lora has "
                f"rank {self._lora.rank} and alpha {self._lora.alpha:g}. Give model.lora the adapter's values, or "
                "start without it"
            )
        tensors = load_file(folder / "adapter_model.safetensors")
        own = self.tensors(name)
        if set(own) != set(tensors) or any(own[key].shape != tensors[key].shape for key in own):
            raise ArtifactError(
                f"the adapter in {folder} is for another model or for other layers than model.lora.target_modules="
                f"{self._lora.target_modules}. Start from an adapter of this model, or without one"
            )
        set_peft_model_state_dict(self.model, tensors, adapter_name=name)

    def save(self, folder: Path) -> None:
        """Writes a PEFT folder. It names the base and the layers; a path would tie it to one machine."""
        from peft import LoraConfig
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        base = Path(self._name)
        resolved = self.model.peft_config[LEARNING].target_modules  # `all-linear` by now stands as names of layers
        arguments = _peft_arguments(self._lora) | {
            "base_model_name_or_path": base.name if base.is_dir() else self._name,
            "target_modules": sorted({module.rpartition(".")[2] for module in resolved}),
        }
        text = json.dumps(LoraConfig(**arguments).to_dict(), indent=2, sort_keys=True, default=sorted)
        (folder / "adapter_config.json").write_text(text + "\n")

    def use_reference(self, folder: Path | None) -> None:
        """Chooses the reference: a saved adapter, or the base model where it is None."""
        from peft import LoraConfig

        if folder is not None:
            if REFERENCE not in self.model.peft_config:
                self.model.add_adapter(REFERENCE, LoraConfig(**_peft_arguments(self._lora), inference_mode=True))
                self.model.set_adapter(LEARNING)
            self.load(folder, REFERENCE)
        self._reference = folder

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, the model computes what the reference would."""
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
        """There is no copy to free."""

    def copy_as(self, name: str) -> None:
        """A further adapter on the same base, a copy of the one that learns. There may be one of this name already."""
        from peft import LoraConfig, set_peft_model_state_dict

        if name not in self.model.peft_config:
            self.model.add_adapter(name, LoraConfig(**_peft_arguments(self._lora)))
            self.model.set_adapter(LEARNING)
        set_peft_model_state_dict(self.model, self.tensors(), adapter_name=name)

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[dict[str, torch.nn.Parameter]]:
        """Inside, a further adapter is the one that computes and the one that learns. Gives its parameters by name.
        PEFT takes gradients of the adapter in use only: whoever needs them calls backward inside."""
        self.model.set_adapter(name)
        try:
            yield self.parameters
        finally:
            self.model.set_adapter(LEARNING)


def _peft_arguments(lora: LoraSpec) -> dict:
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": lora.target_modules,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
