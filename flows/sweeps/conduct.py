"""Execution of a sweep from start to summary, around Hydra's multirun."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from hydra.core.override_parser.types import Override

from flows.execution import tracking
from flows.experiment.spec import ExperimentSpec
from flows.experiment.sweep_settings import OptunaSpec, default_objective
from flows.sweeps import summary
from flows.terminal.arguments import DEFAULT_ROOT
from flows.terminal.interrupt import Interruption

DIRECTORY = "hydra.sweep.dir"


def folder_of(overrides: Sequence[Override], specs: Sequence[ExperimentSpec], settings: OptunaSpec | None) -> Path:
    """Return the folder of a sweep, whose name is the sweep's id. A study always has the same folder, so that it can be
    resumed."""
    for override in overrides:
        if override.get_key_element() == DIRECTORY:
            return Path(str(override.value())).absolute()
    root = specs[0].root if specs else str(DEFAULT_ROOT)
    if settings is not None:
        return Path(root) / "sweeps" / (settings.study or specs[0].name)
    return Path(root) / "sweeps" / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{os.getpid()}"


def conduct(
    folder: Path,
    specs: Sequence[ExperimentSpec],
    settings: OptunaSpec | None,
    command: Sequence[str],
    multirun: Callable[[], None],
) -> int:
    """Run the sweep, write its summary and return the exit code. With several seeds of the same configuration, print
    their means as one JSON object, the last line on stdout.

    command: prefix of the command that runs a single point; the point's overrides are appended. Raises
    KeyboardInterrupt and Hydra's errors.
    """
    with Interruption() as interruption:
        interruption.last_words.append(end_workers)
        try:
            multirun()
        except BrokenProcessPool:
            print("a process of the sweep died; run the same command again to resume", file=sys.stderr)
        finally:
            end_workers()
    objective = default_objective(specs[0].environment)
    metric, direction = (settings.metric, settings.direction) if settings else objective
    root = Path(specs[0].root)
    result = summary.summarise(folder, metric, direction, command, root, specs[0].store)
    page = summary.write(result, folder, root, folder.name)
    tracking.conclude_sweep(
        root,
        specs[0],
        folder.name,
        failed=bool(result.unsuccessful),
        metrics=result.figures(),
        files=[folder / summary.FILE, *([page] if page else [])],
    )
    summary.show(result, folder.name, page)
    if groups := result.seeds:
        print(json.dumps({"sweep": folder.name, "seeds": [group.to_json() for group in groups]}), flush=True)
    return result.code


def end_workers() -> None:
    """Stop joblib's worker processes, which otherwise wait five minutes for more work and delay the exit."""
    if "joblib.externals.loky" in sys.modules:
        from joblib.externals.loky import reusable_executor

        if (executor := reusable_executor._executor) is not None:
            executor.shutdown(wait=True, kill_workers=True)
