"""Distributed training as a configuration file of accelerate describes it.

torchrun starts the processes, as `accelerate launch` does; neither accelerate nor DeepSpeed need be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from components.compute.accelerate.config_file import PRECISIONS, LaunchConfig, read
from components.compute.place import Place
from components.compute.runners import ProcessRunner, RunnerContext
from components.compute.torchrun.spec import TorchrunPlace
from components.compute.training_group import TrainingGroup
from components.errors import Problem
from components.models.spec import ModelSpec


class AcceleratePlace(Place):
    """Several processes that train together, by a file that `accelerate config` wrote. Only stages that train run
    here."""

    name: Literal["accelerate"] = "accelerate"
    config_file: str
    """Configuration file of accelerate (YAML). It states the number of processes, the sharding and the precision."""
    timeout: float = Field(1800.0, gt=0)
    """Seconds that a process waits for the others before all end."""

    @field_validator("config_file", mode="before")
    @classmethod
    def _stated(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("a file that `accelerate config` wrote: compute.config_file=FILE")
        return value

    @property
    def config(self) -> LaunchConfig | None:
        """Content of the file; None if it has problems."""
        return read(Path(self.config_file))[0]

    @property
    def group(self) -> TrainingGroup | None:
        config = self.config
        return None if config is None else TrainingGroup(config.processes, config.strategy, self.timeout)

    def describe(self) -> str:
        group = self.group
        return "" if group is None else f"{group.processes} processes, {group.strategy}"

    def training_problems(self, key: str, model: ModelSpec, max_grad_norm: float) -> Iterator[Problem]:
        config, problems = read(Path(self.config_file))
        texts = list(problems)
        if config is not None:
            precision = next(value for value, dtype in PRECISIONS.items() if dtype == config.dtype)
            if model.dtype not in (config.dtype, "auto"):
                texts.append(
                    f"mixed_precision = {precision}: is model.dtype={config.dtype}, but model.dtype={model.dtype}; "
                    f"set model.dtype={config.dtype} (it is part of the stage keys), or change the file"
                )
            if config.cpu and model.device != "cpu":
                texts.append(f"use_cpu = true: needs model.device=cpu, but model.device={model.device}")
            if not config.cpu and model.device == "cpu":
                texts.append("use_cpu = false: but model.device=cpu; set use_cpu: true, or model.device=auto")
            if config.clipping is not None and config.clipping != max_grad_norm:
                texts.append(
                    f"deepspeed_config.gradient_clipping = {config.clipping:g}: is algorithm.max_grad_norm, but that "
                    f"is {max_grad_norm:g}; set algorithm.max_grad_norm={config.clipping:g}, or change the file"
                )
        for text in texts:
            yield Problem(f"{key}.config_file", f"{self.config_file}: {text}")

    def group_problems(self, key: str, scenarios: int, model: ModelSpec, unsharded: str | None) -> Iterator[Problem]:
        for problem in super().group_problems(key, scenarios, model, unsharded):
            setting = problem.path.removeprefix(f"{key}.")
            name = {"processes": "num_processes", "strategy": "distributed_type"}[setting]
            yield Problem(f"{key}.config_file", f"{self.config_file}: {name}: {problem.message}")

    def notes(self) -> Iterator[str]:
        config = self.config
        if config is not None and config.mapped is not None:
            yield f"config_file: {self.config_file}: {config.mapped}"

    def prerequisites(self) -> Iterator[str]:
        config = self.config
        if config is None or config.cpu:
            return
        import torch

        if (available := torch.cuda.device_count()) < config.processes:
            yield (
                f"config_file: {self.config_file}: num_processes = {config.processes}: this machine has {available} "
                "GPUs; expected a GPU for each process, or use_cpu: true with model.device=cpu"
            )

    def refusal(self, name: str, stage: str, distributed: Sequence[str]) -> str | None:
        return TorchrunPlace().refusal(name, stage, distributed)

    def runner(self, name: str, context: RunnerContext) -> ProcessRunner:
        group = self.group
        assert group is not None, "checked before the run"
        place = TorchrunPlace(processes=group.processes, strategy=group.strategy, timeout=self.timeout)
        return place.runner(name, context)
