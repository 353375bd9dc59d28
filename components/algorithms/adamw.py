"""AdamW (arXiv:1711.05101) of torch, for weights of a shorter type too.

A step of full fine-tuning is often smaller than what bfloat16 tells apart, and would be rounded away. So of parameters
that are not float32 a copy that is gets the step, with moments in float32 as well, and the parameter is its rounding
(arXiv:1710.03740, section 3.1). The copy is part of the optimizer's state, `MASTER`.
"""

from __future__ import annotations

from typing import Any

import torch

MASTER = "master"


class AdamW(torch.optim.AdamW):
    """As torch's where all parameters are float32."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rounded = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.dtype != torch.float32 and parameter.grad is not None
        ]
        short = {parameter: (parameter.data, parameter.grad) for parameter in rounded}
        for parameter in rounded:
            gradient = parameter.grad.float()
            parameter.grad = None
            parameter.data = self.state[parameter].pop(MASTER, parameter.data.float())
            parameter.grad = gradient
        try:
            loss = super().step(closure)
        finally:
            for parameter, (data, gradient) in short.items():
                self.state[parameter][MASTER] = parameter.data
                parameter.grad = None
                parameter.data = data.copy_(parameter.data)
                parameter.grad = gradient
        return loss
