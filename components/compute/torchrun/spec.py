"""Distributed training on this machine: one process per GPU, or processes on the cores of a CPU.

torchrun starts the processes (`components.compute.launch`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from components.compute.place import Place
from components.compute.runners import KeptProcessRunner, ProcessRunner, RunnerContext, StageProcess
from components.compute.training_group import Processes, Strategy, TrainingGroup
from components.models.gpus import visible_gpus


class TorchrunPlace(Place):
    """Several processes that train together. Only stages that train run here."""

    name: Literal["torchrun"] = "torchrun"
    processes: Processes = 2
    """Number of processes per machine: one per GPU, or on CPUs the number that shares its cores. `auto`: as many as
    this machine has GPUs, one without a GPU."""
    strategy: Strategy = "ddp"
    """Sharding across the processes. `ddp`: none, each holds everything; `zero2`: gradients and optimizer state, and
    the weights between two steps; `fsdp`: weights too, except the layer being computed;
    `fsdp_offload`: as `fsdp`, with all of them in the memory of the host."""
    timeout: float = Field(1800.0, gt=0)
    """Seconds that a process waits for the others before all end."""

    @property
    def group(self) -> TrainingGroup:
        count = len(visible_gpus()) or 1 if self.processes == "auto" else self.processes
        return TrainingGroup(count, self.strategy, self.timeout)

    def refusal(self, name: str, stage: str, distributed: Sequence[str]) -> str | None:
        if stage in distributed:
            return None
        return (
            f"runs in several processes, which only {' and '.join(distributed)} support; expected another place. "
            f"Assign it to a single stage: compute.stages.train={name}"
        )

    def command(self, process: StageProcess) -> list[str]:
        """Return the command that starts the processes of a stage."""
        launch = [
            "-m",
            "components.compute.launch",
            "--processes",
            str(self.group.processes),
            "--log",
            str(process.log),
        ]
        return [sys.executable, *launch, "--", process.module, *process.options, *self.group.options()]

    def runner(self, name: str, context: RunnerContext) -> ProcessRunner:
        """Return a runner that keeps the processes from one training of a model to the next."""
        return KeptProcessRunner(
            context.process, self.command(context.process), only=lambda request: request["spec"].get("model")
        )
