"""Hidden states to logits: the output head, and the transforms that some model families apply after it.

    Gemma, nanochat     c · tanh(logits / c)      final_logit_softcapping (arXiv:2408.00118, section 2)
    Cohere              logits · s                logit_scale
    Granite             logits / s                logits_scaling; HyperCLOVA X multiplies
    Falcon-H1           logits · s                lm_head_multiplier

All of them can be computed for a subset of rows. The config only suggests a transform: `exactness` uses the first
candidate that reproduces the model's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LogitTransform = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LogitHead:
    """Function from (·, D) last hidden states to (·, V) logits."""

    linear: torch.nn.Module
    transform: LogitTransform

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.transform(self.linear(hidden))

    @property
    def adapted(self) -> bool:
        """Return True if the head has a PEFT adapter."""
        return hasattr(self.linear, "lora_A")


def candidate_transforms(config: PreTrainedConfig) -> Iterator[LogitTransform]:
    """Yield the candidate transforms after the head, by the model's config; the identity comes last."""
    text = config.get_text_config()
    if cap := getattr(text, "final_logit_softcapping", None):
        yield partial(_capped, cap=cap)
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if scale := getattr(text, name, None):
            yield partial(torch.mul, other=scale)
            yield partial(torch.div, other=scale)
    yield identity


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(logits / cap) * cap


def identity(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits unchanged."""
    return logits
