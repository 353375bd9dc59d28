"""A checkpoint: what was learned, and everything needed to continue training as if it had never stopped.

adapter/ or weights/   what was learned (`models.learned`)
optimizer.safetensors  AdamW's two moments by parameter, and what it rounds (`adamw`)
trainer.json           algorithm, gradient steps taken, AdamW's step, scale of the loss in float16
rng.safetensors        state of torch's random generators
critic/                of PPO (`critic`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from components.algorithms.loop.adamw import KEPT
from components.algorithms.loop.loss_scale import LossScale
from components.algorithms.policy import sharded
from components.json_text import read_json

CRITIC = "critic"


Moments = tuple[dict[str, torch.Tensor], dict[str, float]]
"""What the optimizer keeps, by name, and by parameter the steps that it took."""


def moments(optimizer: torch.optim.Optimizer, names: list[str]) -> Moments:
    """names: of the optimizer's parameters, in its order. Where these lie in parts, all processes ask."""
    tensors, steps = {}, {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        for kind in KEPT:
            if kind in state:
                tensors[f"{name}/{kind}"] = sharded.whole(state[kind]).cpu().contiguous()
        if "step" in state:
            steps[name] = float(state["step"])
    return tensors, steps


def save_state(
    folder: Path,
    *,
    algorithm: str,
    step: int,
    moments: Moments,
    loss_scale: Mapping[str, float],
    random: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write all but policy and critic. loss_scale: its state. random: what `random_states` gave at that step; None is
    now."""
    from safetensors.torch import save_file

    tensors, steps = moments
    save_file(tensors, folder / "optimizer.safetensors")
    save_file(random or random_states(), folder / "rng.safetensors")
    trainer = {"algorithm": algorithm, "step": step, "optimizer_steps": steps}
    trainer |= {"loss_scale": dict(loss_scale)} if loss_scale else {}
    (folder / "trainer.json").write_text(json.dumps(trainer, indent=1, sort_keys=True) + "\n")


def load_state(
    folder: Path, *, algorithm: str, optimizer: torch.optim.Optimizer, names: list[str], loss_scale: LossScale
) -> int:
    """Restore optimizer, scale of the loss and random state where the checkpoint comes from the same algorithm; return
    the gradient steps taken. Another algorithm's moments mean nothing here: then 0, and nothing is restored."""
    from safetensors.torch import load_file

    trainer: dict[str, Any] = read_json(folder / "trainer.json")
    if trainer["algorithm"] != algorithm:
        return 0
    tensors = load_file(folder / "optimizer.safetensors")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if name in trainer["optimizer_steps"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(trainer["optimizer_steps"][name]),
                **{kind: sharded.part(tensors[at], parameter) for kind in KEPT if (at := f"{name}/{kind}") in tensors},
            }
    loss_scale.load(trainer.get("loss_scale", {}))
    set_random_states(load_file(folder / "rng.safetensors"))
    return int(trainer["step"])


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Puts back what `random_states` gave."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def random_states() -> dict[str, torch.Tensor]:
    """State of torch's random generators."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states
