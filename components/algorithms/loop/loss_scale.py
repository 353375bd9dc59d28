"""Dynamic loss scaling for gradients in float16 (arXiv:1710.03740, section 3.2), with the rule and the numbers of
`torch.amp.GradScaler`.

Small gradients are zero in float16, whose smallest number is 6e-8. So the loss is multiplied by a scale before the
backward pass, and the gradients, which parameters hold in float32, are divided by it after that. Where the scaled
gradients pass the largest number of float16, 65504, the step is left out and the scale is halved; after 2,000 steps
without that, it is doubled.

Unlike GradScaler, the scale does not fall below 1: gradients that are not finite at this scale are not finite without
one, and the guard `non_finite` decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch

INITIAL = 65536.0
SMALLEST = 1.0
GROWTH_INTERVAL = 2000
"""Steps without an overflow before the scale is doubled."""


@dataclass
class LossScale:
    """The scale of a training. Without `enabled` it is 1 and stays so."""

    enabled: bool
    value: float = INITIAL
    steps: int = 0
    """Since the last change."""

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """Return the scale with which a training in a type begins."""
        return cls(True) if dtype == "float16" else cls(False, 1.0)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the scaled loss to the parameters."""
        (loss * self.value if self.enabled else loss).backward()

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Divide the gradients by the scale, once all losses of a step are added up."""
        if self.enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self.value)

    def overflowed(self, measured: Mapping[str, float]) -> bool:
        """Return whether a gradient is not finite though the loss is, and a smaller scale may help. measured: metrics
        of a step, `loss` and norms of gradients among them."""
        norms = [measured[name] for name in ("grad_norm", "value_grad_norm") if name in measured]
        broken = math.isfinite(measured["loss"]) and not all(map(math.isfinite, norms))
        return self.enabled and self.value > SMALLEST and broken

    def update(self, overflowed: bool) -> None:
        """Halve the scale after a step that overflowed, double it after `GROWTH_INTERVAL` steps that did not."""
        if not self.enabled:
            return
        if overflowed:
            self.value, self.steps = max(self.value / 2, SMALLEST), 0
        elif self.steps + 1 == GROWTH_INTERVAL:
            self.value, self.steps = self.value * 2, 0
        else:
            self.steps += 1

    def advice(self, text: str) -> str:
        """Return the advice of the guard `non_finite`, and what else may help in float16."""
        return f"{text}, or take model.dtype=float32: float16 ends at 65504" if self.enabled else text

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps of it; nothing where it is not enabled."""
        return {name: value for name, value in asdict(self).items() if name != "enabled"} if self.enabled else {}

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from the state of a checkpoint; one of a training in another type has none."""
        if self.enabled and state:
            self.value, self.steps = float(state["value"]), int(state["steps"])
