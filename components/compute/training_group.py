"""Group of processes that train together: size, sharding, and checks.

Precision is not part of it: `model.dtype` sets it, because it affects what is learned, and the place of a stage does
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from components.errors import Problem

Strategy = Literal["ddp", "zero2", "fsdp"]
TRAINING_STAGES = ("train", "reward_model")
"""Stages that can run in several processes."""


@dataclass(frozen=True)
class Training:
    """Settings of an experiment's training that limit its group of processes."""

    scenarios: int
    """`collect.scenarios`: groups of episodes in a round."""
    quantization: str
    """`model.quantization`."""
    all_weights: bool
    """True without LoRA (`model.lora=null`)."""
    dtype: str
    """`model.dtype`."""
    unsharded: str | None
    """Feature in use that does not support sharded training of all weights; None without one."""


@dataclass(frozen=True)
class TrainingGroup:
    """Group of processes that train together."""

    processes: int
    """Number of processes on each node."""
    strategy: Strategy
    """Sharding across the processes."""
    timeout: float
    """Seconds that a process waits for the others before all end."""
    nodes: int = 1
    """Number of machines."""

    @property
    def size(self) -> int:
        """Number of processes on all nodes."""
        return self.nodes * self.processes

    def options(self) -> list[str]:
        """Return the options of `flows.stage` in each of the processes."""
        return ["--strategy", self.strategy, "--group-timeout", str(self.timeout)]

    def problems(self, key: str, training: Training) -> Iterator[Problem]:
        """Yield the settings of a training that the group does not support. key: key path of the place."""
        if self.size == 1:
            return
        if self.size > training.scenarios:
            nodes = f" on each of {self.nodes} nodes" if self.nodes > 1 else ""
            yield Problem(
                f"{key}.processes",
                f"{self.processes}{nodes}, but a round has collect.scenarios={training.scenarios} groups: some "
                f"processes would have none; expected at most {training.scenarios}{' in total' * bool(nodes)}",
            )
        if self.strategy == "ddp":
            return
        if training.quantization != "none":
            yield Problem(
                f"{key}.strategy",
                f"{self.strategy}: cannot shard a quantized model (model.quantization={training.quantization}); "
                "expected ddp",
            )
        if training.all_weights and training.dtype != "float32":
            yield Problem(
                f"{key}.strategy",
                f"{self.strategy}: trains all weights (model.lora=null) in float32 only, but "
                f"model.dtype={training.dtype}; expected model.dtype=float32, model.lora with a rank, or ddp",
            )
        if training.all_weights and training.unsharded is not None:
            yield Problem(
                f"{key}.strategy",
                f"{self.strategy}: {training.unsharded} does not support sharded training of all weights "
                "(model.lora=null); expected ddp, or model.lora with a rank",
            )
