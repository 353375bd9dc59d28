"""Checkpoint: the trained weights and the state needed to continue training as if it had not been interrupted.

adapter/ or weights/   trained weights (`models.trained_weights`) optimizer.safetensors  AdamW's two moments per
parameter, and float32 master weights (`adamw`) trainer.json           algorithm, number of gradient steps, AdamW's
step, loss scale in float16 rng.safetensors        state of torch's random generators critic/                critic of
PPO (`critic`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from components.algorithms.loop.adamw import FLOAT32_STATE, MASTER
from components.algorithms.loop.loss_scale import LossScale
from components.algorithms.policy import sharded
from components.json_text import read_json
from components.models.files import write_tensors

CRITIC = "critic"


def save_state(
    folder: Path,
    *,
    algorithm: str,
    step: int,
    optimizer: torch.optim.Optimizer,
    names: list[str],
    loss_scale: Mapping[str, float],
    first: bool = True,
) -> None:
    """Write the training state without policy and critic, a tensor at a time. names: names of the optimizer's
    parameters, in its order. loss_scale: its state. first: this is the process that writes; if parameters are sharded,
    all must call this (`sharded.gather_to_first`)."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    steps: dict[str, float] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{name}/{kind}": state[kind] for kind in FLOAT32_STATE if kind in state}
        if "step" in state:
            steps[name] = float(state["step"])
            if getattr(optimizer, "parameters_are_masters", False):
                tensors[f"{name}/{MASTER}"] = parameter
    gathered = ((key, sharded.gather_to_first(tensor)) for key, tensor in tensors.items())
    write_tensors(folder / "optimizer.safetensors" if first else None, tensors, gathered)
    if not first:
        return
    save_file(random_states(), folder / "rng.safetensors")
    trainer = {"algorithm": algorithm, "step": step, "optimizer_steps": steps}
    trainer |= {"loss_scale": dict(loss_scale)} if loss_scale else {}
    (folder / "trainer.json").write_text(json.dumps(trainer, indent=1, sort_keys=True) + "\n")


def load_state(
    folder: Path, *, algorithm: str, optimizer: torch.optim.Optimizer, names: list[str], loss_scale: LossScale
) -> int:
    """Restore optimizer, loss scale and random state from a checkpoint of the same algorithm; return its number of
    gradient steps. For another algorithm, whose moments do not apply, restore nothing and return 0."""
    from safetensors.torch import load_file

    trainer: dict[str, Any] = read_json(folder / "trainer.json")
    if trainer["algorithm"] != algorithm:
        return 0
    tensors = load_file(folder / "optimizer.safetensors")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if name in trainer["optimizer_steps"]:
            state = {kind: tensors[f"{name}/{kind}"] for kind in FLOAT32_STATE if f"{name}/{kind}" in tensors}
            if getattr(optimizer, "parameters_are_masters", False):
                sharded.fill(parameter, state.pop(MASTER))
            optimizer.state[parameter] = {"step": torch.tensor(trainer["optimizer_steps"][name])}
            for kind, tensor in state.items():
                optimizer.state[parameter][kind] = torch.empty_like(parameter, dtype=torch.float32)
                sharded.fill(optimizer.state[parameter][kind], tensor)
    loss_scale.load(trainer.get("loss_scale", {}))
    set_random_states(load_file(folder / "rng.safetensors"))
    return int(trainer["step"])


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Restore the result of `random_states`."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def random_states() -> dict[str, torch.Tensor]:
    """Return the state of torch's random generators."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states
