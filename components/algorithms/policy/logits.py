"""From hidden states to logits: the head, and what some families do to its logits after it.

    Gemma, nanochat     c · tanh(logits / c)      final_logit_softcapping (arXiv:2408.00118, section 2)
    Cohere              logits · s                logit_scale
    Granite             logits / s                logits_scaling; HyperCLOVA X multiplies
    Falcon-H1           logits · s                lm_head_multiplier

These can be made for some rows at a time. What a config names is a guess of what the model computes: `exactness` takes
the first one that the model confirms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

After = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Head:
    """Makes (·, V) logits of (·, D) last hidden states."""

    linear: torch.nn.Module
    after: After

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.after(self.linear(hidden))

    @property
    def adapted(self) -> bool:
        """Whether an adapter of PEFT is on it."""
        return hasattr(self.linear, "lora_A")


def guesses(config: PreTrainedConfig) -> Iterator[After]:
    """What may come after the head, by the model's config; in the end that nothing does."""
    text = config.get_text_config()
    if cap := getattr(text, "final_logit_softcapping", None):
        yield partial(_capped, cap=cap)
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if scale := getattr(text, name, None):
            yield partial(torch.mul, other=scale)
            yield partial(torch.div, other=scale)
    yield nothing


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(logits / cap) * cap


def nothing(logits: torch.Tensor) -> torch.Tensor:
    """The logits as the head gives them."""
    return logits
