"""`python -m flows.run +experiment=NAME [overrides]`: run an experiment, or with `-m` a sweep.

Hydra composes the configuration, sweeps and launches. Before that, `flows.experiment.compose.check` validates all
overrides and values. It reports all errors at once, without a stack trace and before any heavy import. At module level
this file imports the standard library only.

Exit codes: 0 success, 1 failure, 2 user error (configuration, weights, disk space), 130 interrupted. If a point of a
sweep fails, the other points still run, and the sweep exits with the code of the failed point.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from components.errors import EspalierError
from flows.terminal.exit_codes import describe_error, print_message

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from flows.experiment.composer import Sweep
    from flows.experiment.spec import ExperimentSpec

COMMAND = "python -m flows.run"


def main(argv: list[str] | None = None) -> None:
    """Run the command. Raises SystemExit if it does not succeed."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv or {"-h", "--help"} & set(argv):
            _help(argv)
        else:
            _start(argv)
    except EspalierError as error:
        message_and_code = describe_error(error)
        assert message_and_code is not None
        _fail(*message_and_code)
    except KeyboardInterrupt:
        _fail("interrupted; run the same command again to resume", 130)


def _fail(message: str, code: int) -> NoReturn:
    print_message(message)
    raise SystemExit(code)


def _help(argv: list[str]) -> None:
    from flows.terminal import help

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    config_dir = parser.parse_known_args(argv)[0].config_dir
    print(help.text([config_dir, help.CONF] if config_dir and config_dir.is_dir() else [help.CONF]), end="")


def _start(argv: list[str]) -> None:
    from flows.experiment.compose import check_secrets, compose_points
    from flows.experiment.prerequisites import check_keys
    from flows.terminal.run_options import parse_options

    args, parser = parse_options(argv, COMMAND)
    if args.fork is not None:
        args.overrides.append(f"fork={_quoted(args.fork)}")
    if args.info or args.hydra_help:
        check_secrets(args.overrides, multirun=args.multirun, config_dir=args.config_dir)
    if not (args.hydra_help or args.shell_completion or args.info):
        specs, sweep = compose_points(args.overrides, multirun=args.multirun, config_dir=args.config_dir, named=True)
        check_keys(*specs)
        if sweep is not None and args.cfg is None:
            if sweep.seeds:
                args.overrides = [line for line in args.overrides if not line.startswith("seeds=")] + sweep.seeds
                args.multirun = True
            _sweep(args, parser, specs, sweep)
            return
    _launch(args, parser)


def _launch(args: argparse.Namespace, parser: argparse.ArgumentParser, mode: str = "RUN") -> None:
    """Call Hydra, which composes the configuration, and in the mode MULTIRUN sweeps."""
    from hydra import version
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    from flows.experiment.config_loader import PRIMARY, Loader
    from flows.experiment.hydra_internals import Hydra

    version.setbase("1.3")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of exiting
    hydra = Hydra(task_name="run", config_loader=Loader(args.config_dir))
    GlobalHydra.instance().initialize(hydra)
    try:
        if args.hydra_help:
            hydra.hydra_help(PRIMARY, parser, args)
        elif args.cfg:
            hydra.show_cfg(PRIMARY, args.overrides, args.cfg, args.package, args.resolve)
        elif args.shell_completion:
            hydra.shell_completion(PRIMARY, args.overrides)
        elif args.info:
            hydra.show_info(args.info, PRIMARY, args.overrides)
        else:
            args.overrides.append(f"hydra.mode={mode}")
            launch = hydra.run if mode == "RUN" else hydra.multirun
            launch(config_name=PRIMARY, task_function=job, overrides=args.overrides)
    except HydraException as error:
        _fail(str(error), 2)
    except SystemExit as end:
        if args.package and end.code == 1:  # unknown --package, which Hydra has reported
            raise SystemExit(2) from None
        raise
    finally:
        GlobalHydra.instance().clear()


def _sweep(
    args: argparse.Namespace, parser: argparse.ArgumentParser, specs: list[ExperimentSpec], sweep: Sweep
) -> None:
    """Run a sweep. Raises SystemExit if a point failed."""
    from flows.experiment.sweep_settings import optuna_settings
    from flows.sweeps import conduct

    settings = optuna_settings(sweep.hydra)
    folder = conduct.folder_of(sweep.overrides, specs, settings)
    args.overrides.append(f"{conduct.DIRECTORY}={_quoted(str(folder))}")
    if settings is not None:
        from flows.sweeps.study import prepare

        prepare(folder, settings, sweep.overrides, specs[0])
    point_command = shlex.split(COMMAND)
    point_command += ["--config-dir", args.config_dir] if args.config_dir else []
    point_command += [] if args.multirun else ["hydra.mode=RUN"]  # the experiment's config itself requests a sweep
    code = conduct.conduct(folder, specs, settings, point_command, lambda: _launch(args, parser, "MULTIRUN"))
    if code:
        raise SystemExit(code)


def _quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()


def job(config: DictConfig) -> float:
    """Run one experiment, called by Hydra.

    Return the metric that a sweeper optimises: held-out success, the loss of held-out rows without an environment, or
    the metric set by `hydra/sweeper=optuna`; NaN if the point failed.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from flows.experiment.sweep_settings import TRIAL, default_objective, optuna_settings
    from flows.sweeps.points import attempt

    hydra = HydraConfig.get()
    data: Any = OmegaConf.to_container(config, resolve=True)
    overrides = list(hydra.overrides.task)
    metric = default_objective(data.get("environment"))[0]

    def run(**options: Any) -> dict[str, Any]:
        from components.specs import validate
        from flows.experiment.spec import ExperimentSpec

        spec = validate(ExperimentSpec, data)
        from flows.session import run

        return run(spec, overrides=overrides, **options)

    if hydra.mode == RunMode.MULTIRUN:
        folder = Path(hydra.sweep.dir)
        sweeper: Any = OmegaConf.to_container(hydra.sweeper, resolve=True)
        number = sweeper.pop(TRIAL, None)
        if number is None:
            return attempt(folder, hydra.job.num, overrides, lambda: run(sweep=folder.name), metric)
        settings = optuna_settings({"sweeper": sweeper})
        assert settings is not None

        def trial() -> dict[str, Any]:
            from flows.sweeps.study import pruning

            return run(sweep=folder.name, prune=pruning(folder, settings, number))

        return attempt(folder, number, overrides, trial, settings.metric)
    try:
        return run()[metric] or 0.0
    except Exception as error:
        if (message_and_code := describe_error(error)) is None:
            raise
        _fail(*message_and_code)


if __name__ == "__main__":
    from flows.run import main as run_main  # so that a launcher can pickle `job` by an importable name
    from flows.terminal.interrupt import leave

    leave(run_main)
