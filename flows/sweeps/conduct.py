"""A sweep from its start to its summary; Hydra's multirun is in the middle."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from hydra.core.override_parser.types import Override

from flows.execution import tracking
from flows.experiment.spec import CODE, ExperimentSpec
from flows.experiment.sweep_settings import OptunaSpec
from flows.sweeps import summary
from flows.terminal.interrupt import Interruption

DIRECTORY = "hydra.sweep.dir"


def folder_of(overrides: Sequence[Override], specs: Sequence[ExperimentSpec], settings: OptunaSpec | None) -> Path:
    """Where a sweep leaves its notes; its name is the sweep's id. A study always has the same, so that it is found
    again."""
    for one in overrides:
        if one.get_key_element() == DIRECTORY:
            return Path(str(one.value())).absolute()
    root = specs[0].root if specs else str(CODE / "runs")
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
    """Runs the sweep and sums it up. Returns the exit code.

    command: what a point's overrides are added to, to run it alone. Raises KeyboardInterrupt, and what Hydra raises.
    """
    with Interruption() as interruption:
        interruption.last_words.append(end_workers)
        try:
            multirun()
        except BrokenProcessPool:
            print("a process of the sweep died; the same command runs what is left of it", file=sys.stderr)
        finally:
            end_workers()
    metric, direction = (settings.metric, settings.direction) if settings else ("success", "maximize")
    found = summary.summarise(folder, metric, direction, command)
    root = Path(specs[0].root)
    page = summary.write(found, folder, root, folder.name)
    tracking.conclude_sweep(
        root,
        specs[0],
        folder.name,
        failed=bool(found.broken),
        metrics=found.figures(),
        files=[folder / summary.FILE, *([page] if page else [])],
    )
    summary.show(found, folder.name, page)
    return found.code


def end_workers() -> None:
    """Ends joblib's processes, which would wait five minutes for more work, and we with them."""
    if "joblib.externals.loky" in sys.modules:
        from joblib.externals.loky import reusable_executor

        if (executor := reusable_executor._executor) is not None:
            executor.shutdown(wait=True, kill_workers=True)
