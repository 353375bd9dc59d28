"""`python -m flows.run +experiment=NAME [overrides]`: runs an experiment; with `-m`, sweeps.

Hydra composes, sweeps and launches. Before it starts, `flows.config.check` looks at all overrides and values, so a
user's mistake is answered at once, whole and without a stack trace, and nothing heavy has been imported. At module
level this file imports the standard library only.

Exit codes: 0 done, 1 failed, 2 a mistake of the user (configuration, weights, disk space), 130 interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from components.errors import EspalierError, ResourceError, SpecError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from flows.spec import ExperimentSpec

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
        _fail(*told(error))
    except KeyboardInterrupt:
        _fail("interrupted; the same command goes on from here", 130)


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(code)


def _help(argv: list[str]) -> None:
    from flows import help

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    folder = parser.parse_known_args(argv)[0].config_dir
    print(help.text([folder, help.CONF] if folder and folder.is_dir() else [help.CONF]), end="")


def _start(argv: list[str]) -> None:
    from hydra import version
    from hydra._internal.utils import _run_hydra, get_args_parser
    from hydra.errors import HydraException

    from flows.config import CONF, PRIMARY, check
    from flows.keys import check_keys

    parser = get_args_parser()
    parser.prog = COMMAND
    parser.add_argument("--fork", metavar="RUN@STEP", help="begin with the policy of another run; the same as fork=")
    args = parser.parse_intermixed_args(argv)
    if args.fork is not None:
        args.overrides.append(f"fork={_quoted(args.fork)}")
    for name in ("config_path", "config_name", "experimental_rerun"):
        if getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is not supported; add configs with --config-dir")
    if sum([args.run, args.multirun, args.cfg is not None, args.info is not None, args.shell_completion]) > 1:
        parser.error("only one of --run, --multirun, --cfg, --info and --shell-completion can be given")
    if args.resolve and args.cfg is None:
        parser.error("--resolve goes with --cfg")
    if args.package and args.cfg is None:
        parser.error("--package goes with --cfg")
    if not (args.hydra_help or args.shell_completion or args.info):
        specs = check(args.overrides, multirun=args.multirun, config_dir=args.config_dir, values=args.cfg is None)
        check_keys(*specs)
        if not any(override.startswith("hydra.sweep.dir=") for override in args.overrides):
            args.overrides.append(f"hydra.sweep.dir={_quoted(_sweep_folder(specs))}")
    version.setbase("1.3")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come back here, where they are told apart
    try:
        _run_hydra(args, parser, job, str(CONF), PRIMARY)
    except HydraException as error:
        _fail(str(error), 2)
    except SystemExit as end:
        if args.package and end.code == 1:  # there is no such part; Hydra has said so
            raise SystemExit(2) from None
        raise


def _sweep_folder(specs: list[ExperimentSpec]) -> str:
    """Where Hydra notes a sweep; its name is the sweep's id. Made only where there is a sweep."""
    from flows.spec import CODE

    root = specs[0].root if specs else str(CODE / "runs")
    return f"{root}/sweeps/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{os.getpid()}"


def _quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()


def job(config: DictConfig) -> float:
    """One run, as Hydra calls it. Returns held-out success, which a sweeper may optimise."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from components.specs import validate
    from flows.spec import ExperimentSpec

    hydra = HydraConfig.get()
    data: Any = OmegaConf.to_container(config, resolve=True)
    try:
        spec = validate(ExperimentSpec, data)
        from flows.online_rl import run

        sweep = Path(hydra.sweep.dir).name if hydra.mode == RunMode.MULTIRUN else None
        return run(spec, overrides=list(hydra.overrides.task), sweep=sweep)
    except (EspalierError, OSError) as error:
        _fail(*told(error))  # a mistake at once: the other points of a sweep would meet it too


def told(error: Exception) -> tuple[str, int]:
    """What the user is told of an error, and the exit code. Raises the error again where it was not foreseen."""
    if isinstance(error, SpecError | ResourceError):
        return str(error), 2
    if isinstance(error, EspalierError):
        return f"{type(error).__name__}: {error}", 1
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return f"no space left on the disk of root{where}: make room, then the same command goes on from here", 1
    raise error


if __name__ == "__main__":
    from flows.interrupt import leave
    from flows.run import main as run_main  # so that `job` has an importable name where a launcher sends it elsewhere

    leave(run_main)
