"""Group of processes that train together: size, sharding, and checks.

Precision is not part of it: `model.dtype` sets it, because it affects what is learned, and the place of a stage does
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

from components.errors import Problem
from components.models.spec import ModelSpec

Strategy = Literal["ddp", "zero2", "fsdp", "fsdp_offload"]


def _at_least_one(value: int | str) -> int | str:
    if value != "auto" and int(value) < 1:
        raise ValueError("at least 1, or auto")
    return value


Processes = Annotated[int | Literal["auto"], AfterValidator(_at_least_one)]
"""Number of training processes on each machine; `auto`: one for each of its GPUs, one without a GPU."""


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

    def problems(self, key: str, scenarios: int, model: ModelSpec, unsharded: str | None) -> Iterator[Problem]:
        """Yield the settings of a training that the group does not support.

        key: key path of the place. scenarios: `collect.scenarios`. unsharded: feature in use that does not support
        sharded training of all weights; None without one."""
        if self.size > scenarios:
            nodes = f" on each of {self.nodes} nodes" if self.nodes > 1 else ""
            yield Problem(
                f"{key}.processes",
                f"{self.processes}{nodes}, but a round has collect.scenarios={scenarios} groups: some "
                f"processes would have none; expected at most {scenarios}{' in total' * bool(nodes)}",
            )
        if self.strategy == "ddp":
            return
        if model.quantization != "none":
            yield Problem(
                f"{key}.strategy",
                f"{self.strategy}: cannot shard a quantized model (model.quantization={model.quantization}); "
                "expected ddp",
            )
        if model.cuda_graphs:
            yield Problem(
                f"{key}.strategy",
                f"{self.strategy}: gathers weights during a pass, which model.cuda_graphs=true excludes; expected ddp, "
                "or model.cuda_graphs=false",
            )
        if model.lora is not None and model.lora.roles:
            yield Problem(
                f"{key}.strategy",
                f"{self.strategy}: shards a model with one adapter, but model.lora.roles = "
                f"[{', '.join(model.lora.roles)}]; expected ddp, or model.lora.roles=null",
            )
        if model.lora is None and unsharded is not None:
            yield Problem(
                f"{key}.strategy",
                f"{self.strategy}: {unsharded} does not support sharded training of all weights "
                "(model.lora=null); expected ddp, or model.lora with a rank",
            )
