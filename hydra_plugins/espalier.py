"""What Hydra finds of ours: it takes plugins from this package alone. The work is done in flows/sweeps."""

from __future__ import annotations

from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OptunaSweeper(Sweeper):
    """`hydra/sweeper=optuna`; conf/hydra/sweeper/optuna.yaml has the settings."""

    def __init__(self, **settings: Any) -> None: ...

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.context = hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from flows.sweeps.study import sweep

        sweep(arguments, self.config, self.context.config_loader, self.launcher)
