"""`python -m flows.run +experiment=NAME [overrides]`: runs an experiment; with `-m`, sweeps.

Hydra composes, sweeps and launches. Before it starts, `flows.experiment.compose.check` looks at all overrides and
values, so a user's mistake is answered at once, whole and without a stack trace, and nothing heavy has been imported.
At module level this file imports the standard library only.

Exit codes: 0 done, 1 failed, 2 a mistake of the user (configuration, weights, disk space), 130 interrupted. A point of
a sweep that fails does not end the others; the sweep then ends with the exit code of what failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from components.errors import EspalierError
from flows.terminal.exit_codes import told

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from flows.experiment.compose import Sweep
    from flows.experiment.spec import ExperimentSpec

COMMAND = "python -m flows.run"


def main(argv: list[str] | None = None) -> None:
    """The command. Ends by SystemExit where it does not end well."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv or {"-h", "--help"} & set(argv):
            _help(argv)
        else:
            _start(argv)
    except EspalierError as error:
        found = told(error)
        assert found is not None
        _fail(*found)
    except KeyboardInterrupt:
        _fail("interrupted; the same command goes on from here", 130)


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(code)


def _help(argv: list[str]) -> None:
    from flows.terminal import help

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    folder = parser.parse_known_args(argv)[0].config_dir
    print(help.text([folder, help.CONF] if folder and folder.is_dir() else [help.CONF]), end="")


def _start(argv: list[str]) -> None:
    from flows.experiment.compose import check_secrets, looked_at
    from flows.experiment.prerequisites import check_keys
    from flows.terminal.run_options import parsed

    args, parser = parsed(argv, COMMAND)
    if args.fork is not None:
        args.overrides.append(f"fork={_quoted(args.fork)}")
    if args.info or args.hydra_help:
        check_secrets(args.overrides, multirun=args.multirun, config_dir=args.config_dir)
    if not (args.hydra_help or args.shell_completion or args.info):
        specs, sweep = looked_at(args.overrides, multirun=args.multirun, config_dir=args.config_dir, named=True)
        check_keys(*specs)
        if sweep is not None and args.cfg is None:
            _sweep(args, parser, specs, sweep)
            return
    _launch(args, parser)


def _launch(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Gives the rest to Hydra: it composes, sweeps and launches."""
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import _run_app
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    from flows.experiment.config_loader import PRIMARY, Loader

    version.setbase("1.3")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come back here, where they are told apart
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
            mode = hydra.get_mode(PRIMARY, args.overrides)
            _run_app(not args.multirun, args.multirun, mode, hydra, PRIMARY, job, args.overrides)
    except HydraException as error:
        _fail(str(error), 2)
    except SystemExit as end:
        if args.package and end.code == 1:  # there is no such part; Hydra has said so
            raise SystemExit(2) from None
        raise
    finally:
        GlobalHydra.instance().clear()


def _sweep(
    args: argparse.Namespace, parser: argparse.ArgumentParser, specs: list[ExperimentSpec], sweep: Sweep
) -> None:
    """Ends by SystemExit where a point failed."""
    from flows.experiment.sweep_settings import optuna_settings
    from flows.sweeps import conduct

    settings = optuna_settings(sweep.hydra)
    folder = conduct.folder_of(sweep.overrides, specs, settings)
    args.overrides.append(f"{conduct.DIRECTORY}={_quoted(str(folder))}")
    if settings is not None:
        from flows.sweeps.study import prepare

        prepare(folder, settings, sweep.overrides, specs[0])
    alone = shlex.split(COMMAND)
    alone += ["--config-dir", args.config_dir] if args.config_dir else []
    alone += [] if args.multirun else ["hydra.mode=RUN"]  # the experiment itself asks for a sweep
    code = conduct.conduct(folder, specs, settings, alone, lambda: _launch(args, parser))
    if code:
        raise SystemExit(code)


def _quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()


def job(config: DictConfig) -> float:
    """One run, as Hydra calls it. Returns the metric that a sweeper optimises: held-out success, or what the settings
    of `hydra/sweeper=optuna` say; NaN for a point that failed."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from flows.experiment.sweep_settings import TRIAL, optuna_settings
    from flows.sweeps.points import attempt

    hydra = HydraConfig.get()
    data: Any = OmegaConf.to_container(config, resolve=True)
    overrides = list(hydra.overrides.task)

    def run(**more: Any) -> dict[str, Any]:
        from components.specs import validate
        from flows.experiment.spec import ExperimentSpec

        spec = validate(ExperimentSpec, data)
        from flows.session import run

        return run(spec, overrides=overrides, **more)

    if hydra.mode == RunMode.MULTIRUN:
        folder = Path(hydra.sweep.dir)
        sweeper: Any = OmegaConf.to_container(hydra.sweeper, resolve=True)
        number = sweeper.pop(TRIAL, None)
        if number is None:
            return attempt(folder, hydra.job.num, overrides, lambda: run(sweep=folder.name), "success")
        settings = optuna_settings({"sweeper": sweeper})
        assert settings is not None

        def trial() -> dict[str, Any]:
            from flows.sweeps.pruning import pruning

            return run(sweep=folder.name, prune=pruning(folder, settings, number))

        return attempt(folder, number, overrides, trial, settings.metric)
    try:
        return run()["success"] or 0.0
    except Exception as error:
        if (found := told(error)) is None:
            raise
        _fail(*found)


if __name__ == "__main__":
    from flows.run import main as run_main  # so that `job` has an importable name where a launcher sends it elsewhere
    from flows.terminal.interrupt import leave

    leave(run_main)
