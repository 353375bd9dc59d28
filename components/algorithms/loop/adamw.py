"""AdamW (arXiv:1711.05101) of torch, with float32 master weights for parameters in half precision.

A step of full fine-tuning is often smaller than the resolution of bfloat16 and would be rounded away. So for each
parameter that is not float32, the optimizer updates a float32 copy with float32 moments, and the parameter is its
rounding (arXiv:1710.03740, section 3.1). The copy is part of the optimizer's state, `MASTER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from components.algorithms.spec import OptimizerSpec

MASTER = "master"


FLOAT32_STATE = ("exp_avg", "exp_avg_sq", MASTER)
"""State entries that are float32 whatever the dtype of the parameter."""


class AdamW(torch.optim.AdamW):
    """AdamW that equals torch's if all parameters are float32."""

    parameters_are_masters = False
    """True if the parameters are float32 master weights of a model in half precision (`policy.sharded`)."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state without rounding it. torch's method rounds the state to the parameter's dtype."""
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if name in FLOAT32_STATE:
                    self.state[parameter][name] = value.to(parameter.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        half_precision = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.dtype != torch.float32 and parameter.grad is not None
        ]
        rounded_values = {parameter: (parameter.data, parameter.grad) for parameter in half_precision}
        for parameter in half_precision:
            gradient = parameter.grad.float()
            parameter.grad = None
            state = self.state[parameter]
            parameter.data = state.pop(MASTER) if MASTER in state else parameter.data.float()
            parameter.grad = gradient
        try:
            loss = super().step(closure)
        finally:
            for parameter, (data, gradient) in rounded_values.items():
                self.state[parameter][MASTER] = parameter.data
                parameter.grad = None
                parameter.data = data.copy_(parameter.data)
                parameter.grad = gradient
        return loss


def adamw(spec: OptimizerSpec, groups: Sequence[list[torch.nn.Parameter]]) -> AdamW:
    """Return the optimizer of these groups of parameters."""
    return AdamW(
        [{"params": group} for group in groups],
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
    )
