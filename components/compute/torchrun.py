"""Distributed training on one machine or several: one process per GPU, or processes on the cores of a CPU.

The place sets the number of processes and the sharding; `command` starts them (`launch`). Precision is not part of it:
`model.dtype` sets it, because it affects what is learned, and the place of a stage does not.
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
    """Several processes that train together. Only train and reward_model run here."""

    name: Literal["accelerate"] = "accelerate"
    processes: int = Field(2, ge=1)
    """Number of processes per machine: one per GPU, or on CPUs the number that shares its cores."""
    strategy: Strategy = "ddp"
    """Sharding across the processes. `ddp`: none, each holds everything; `zero2`: gradients and optimizer state, and
    the weights between two steps; `fsdp`: weights too, except the layer being computed."""
    timeout: float = Field(1800.0, gt=0)
    """Seconds that a process waits for the others before all end."""

    @property
    def group(self) -> int:
        """Number of processes that train together."""
        return self.processes


def command(place: AcceleratePlace, stage: Sequence[str], log: Path) -> list[str]:
    """Return the command that starts the processes of a stage. stage: module and options of each process. log: file
    that receives their stderr, for messages."""
    launch = ["-m", "components.compute.launch", "--processes", str(place.processes), "--log", str(log)]
    return [sys.executable, *launch, "--", *stage, *member(place.strategy, place.timeout)]


def member(strategy: Strategy, timeout: float) -> list[str]:
    """Return the options of `flows.stage` in each of the processes."""
    return ["--strategy", strategy, "--group-timeout", str(timeout)]
