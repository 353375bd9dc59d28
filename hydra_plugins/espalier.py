"""Hydra plugins: a sweeper and a launcher. Hydra only loads plugins from this package; flows/sweeps implements them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class OptunaSweeper(Sweeper):
    """Sweeper of `hydra/sweeper=optuna`, configured by conf/hydra/sweeper/optuna.yaml."""

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


class SkyLauncher(Launcher):
    """Launcher of `hydra/launcher=sky`, configured by conf/hydra/launcher/sky.yaml."""

    def __init__(self, **settings: Any) -> None: ...

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.context = hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from omegaconf import OmegaConf

        from flows.experiment.sweep_settings import sky_settings
        from flows.sweeps.launcher import launch

        settings = sky_settings({"launcher": OmegaConf.to_container(self.config.hydra.launcher, resolve=True)})
        assert settings is not None
        return launch(settings, self.config, self.context, job_overrides, initial_job_idx)
