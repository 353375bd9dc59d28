"""Dynamic loss scaling for gradients in float16 (arXiv:1710.03740, section 3.2), with the rule and the constants of
`torch.amp.GradScaler`.

Gradients below 6e-8, the smallest number of float16, underflow to zero. So the loss is multiplied by a scale before the
backward pass, and the gradients, which parameters store in float32, are divided by it afterwards. If scaled gradients
exceed 65504, the largest number of float16, the step is skipped and the scale is halved; after 2,000 steps without an
overflow it is doubled.

Unlike in GradScaler, the scale does not fall below 1: gradients that are not finite at scale 1 are not finite without
scaling either, and the guard `non_finite` responds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch

INITIAL = 65536.0
SMALLEST = 1.0
GROWTH_INTERVAL = 2000
"""Number of steps without an overflow before the scale is doubled."""


@dataclass
class LossScale:
    """Loss scale of a training; constantly 1 unless `enabled`."""

    enabled: bool
    value: float = INITIAL
    steps: int = 0
    """Number of steps since the last change."""

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """Return the initial loss scale for a dtype."""
        return cls(True) if dtype == "float16" else cls(False, 1.0)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the scaled loss to the parameters."""
        (loss * self.value if self.enabled else loss).backward()

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Divide the gradients by the scale, once all losses of a step are added."""
        if self.enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self.value)

    def overflowed(self, measured: Mapping[str, float]) -> bool:
        """Return True if a gradient is not finite although the loss is, and a smaller scale may help. measured: metrics
        of a step, including `loss` and gradient norms."""
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
        """Return the advice of the guard `non_finite`, with a remedy for float16 if the scale is enabled."""
        return f"{text}, or set model.dtype=float32: the largest float16 is 65504" if self.enabled else text

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint; empty if not enabled."""
        return {name: value for name, value in asdict(self).items() if name != "enabled"} if self.enabled else {}

    def load(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint; a checkpoint in another dtype has none."""
        if self.enabled and state:
            self.value, self.steps = float(state["value"]), int(state["steps"])
