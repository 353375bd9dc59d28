"""Training in several processes of one machine, or of each of several: one for each GPU, or on the cores of a CPU.

The place says how many and what is shared out among them; `command` starts them (`launch`). Precision is no part of
it: `model.dtype` decides that, for it changes what is learned, and where a stage runs does not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from components.specs import Spec

Strategy = Literal["ddp", "zero2", "fsdp"]
TOGETHER = ("train", "reward_model")
"""Stages that can run in several processes."""


class AcceleratePlace(Spec):
    """Several processes that train together; train and reward_model run here, and no other stage."""

    name: Literal["accelerate"] = "accelerate"
    processes: int = Field(2, ge=1)
    """On each machine: as many as it has GPUs, or on CPUs as many as share its cores."""
    strategy: Strategy = "ddp"
    """What lies in parts on the processes: `ddp` nothing, each holds all; `zero2` gradients and the state of the
    optimizer, and the weights between two steps; `fsdp` the weights always, but for the layer that computes."""
    timeout: float = Field(1800.0, gt=0)
    """Seconds that a process waits for the others before all end."""

    @property
    def group(self) -> int:
        """Processes that train together."""
        return self.processes


def command(place: AcceleratePlace, stage: Sequence[str], log: Path) -> list[str]:
    """Starts the processes of a stage. stage: module and options of what each runs. log: where a person finds what
    they wrote to stderr."""
    launch = ["-m", "components.compute.launch", "--processes", str(place.processes), "--log", str(log)]
    return [sys.executable, *launch, "--", *stage, *member(place.strategy, place.timeout)]


def member(strategy: Strategy, timeout: float) -> list[str]:
    """Options of `flows.stage` in each of the processes."""
    return ["--strategy", strategy, "--group-timeout", str(timeout)]
