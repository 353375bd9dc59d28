"""AdamW (arXiv:1711.05101) of torch, for weights of a shorter type too.

A step of full fine-tuning is often smaller than what bfloat16 tells apart, and would be rounded away. So of parameters
that are not float32 a copy that is gets the step, with moments in float32 as well, and the parameter is its rounding
(arXiv:1710.03740, section 3.1). The copy is part of the optimizer's state, `MASTER`.
"""

from __future__ import annotations

from typing import Any

import torch

MASTER = "master"


KEPT = ("exp_avg", "exp_avg_sq", MASTER)
"""What of its state is in float32 whatever the parameter is."""


class AdamW(torch.optim.AdamW):
    """As torch's where all parameters are float32."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's rounds the state to the type of the parameter; accelerate calls it whenever it is given an
        optimizer."""
        super().load_state_dict(state_dict)
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, parameter in zip(places, parameters, strict=True):
            for name, value in state_dict["state"].get(place, {}).items():
                if name in KEPT:
                    self.state[parameter][name] = value.to(parameter.device)

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
            state = self.state[parameter]
            parameter.data = state.pop(MASTER) if MASTER in state else parameter.data.float()
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
