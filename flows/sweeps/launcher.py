"""The launcher behind `hydra/launcher=sky`: each point of a sweep, a whole run, is a job on a machine of its own.

`n_jobs` machines of one place take one point after the other. On a machine, `flows.sweeps.elsewhere` plays a point;
what comes back through the store is its result or error, the record of its run and its report. They are put where a
point that ran here has them, so that table, comparison and search take them as they are. The rest is as for stages on
such machines (`components.compute.sky`): the code travels as a snapshot, a machine that is taken away is launched
again, and all go down when the sweep ends, however it ends.

A machine goes down with an error of its own (it could not be launched, the job ended without a word); the next point
gets another. A point that fails leaves it up.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import shutil
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact, Store
from components.compute.runners import error_from_json
from components.compute.sky.failures import full_disk
from components.compute.sky.runner import SkyRunner
from components.compute.sky.spec import SkyPlace
from components.json_text import read_json
from components.specs import validate
from flows.execution import tracking
from flows.experiment.spec import CODE, ExperimentSpec
from flows.experiment.sweep_settings import TRIAL, LauncherSpec, optuna_settings
from flows.history.records import Records
from flows.sweeps.elsewhere import OUTCOME, REPORT
from flows.sweeps.points import attempt

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext
    from omegaconf import DictConfig

MODULE = "flows.sweeps.elsewhere"


@dataclass(frozen=True)
class Sent:
    """A point to be run elsewhere."""

    number: int
    overrides: list[str]
    metric: str
    spec: ExperimentSpec
    data: dict[str, Any]
    """What the spec was composed from; it is validated again there."""


def launch(
    settings: LauncherSpec, config: DictConfig, context: HydraContext, points: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Runs the points and waits for all of them; what became of each stands in its note. Raises KeyboardInterrupt."""
    from hydra.core.utils import JobReturn, JobStatus

    folder = Path(config.hydra.sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    sent = [_composed(config, context, overrides, first + place) for place, overrides in enumerate(points)]
    if sent[0].spec.tracking.uri is None:
        print(
            "tracking.uri is null: MLflow's runs and its model registry stay on the machines of the points; records "
            "and reports come back",
            file=sys.stderr,
        )
    values = Fleet(settings, folder, sorted({name for one in sent for name in one.spec.allow})).run(sent)
    return [
        JobReturn(one.overrides, task_name="run", status=JobStatus.COMPLETED, _return_value=values[one.number])
        for one in sent
    ]


def _composed(config: DictConfig, context: HydraContext, overrides: Sequence[str], number: int) -> Sent:
    from omegaconf import OmegaConf, open_dict

    point = context.config_loader.load_sweep_config(config, list(overrides))
    lines = list(point.hydra.overrides.task)
    sweeper: Any = OmegaConf.to_container(point.hydra.sweeper, resolve=False)
    trial = sweeper.pop(TRIAL, None)
    found = optuna_settings({"sweeper": sweeper})
    with open_dict(point):
        del point["hydra"]
    data: Any = OmegaConf.to_container(point, resolve=True)
    metric = found.metric if found else "success"
    return Sent(number if trial is None else trial, lines, metric, validate(ExperimentSpec, data), data)


class Fleet:
    """The machines of a sweep. folder: of the sweep. packages: of the user, which travel."""

    def __init__(self, settings: LauncherSpec, folder: Path, packages: Sequence[str]):
        self._settings = settings
        self._folder = folder
        self._packages = packages
        self._names = itertools.count()
        self._machines: list[SkyRunner] = []
        self._values: dict[int, float] = {}

    def run(self, sent: Sequence[Sent]) -> dict[int, float]:
        """What `attempt` returns, by number of the point. Raises KeyboardInterrupt; then the machines are going down,
        with us or without us."""
        waiting: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        for one in sent:
            waiting.put(one)
        threads = [
            threading.Thread(target=self._serve, args=(waiting,), name=f"points-{number}", daemon=True)
            for number in range(min(self._settings.n_jobs, len(sent)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():  # so that Ctrl-C comes through
                    thread.join(0.5)
        except KeyboardInterrupt:
            for machine in self._machines:
                machine.stop()
            raise
        return self._values

    def _serve(self, waiting: queue.SimpleQueue[Sent]) -> None:
        """One machine at a time, for as long as there are points."""
        machine: SkyRunner | None = None
        try:
            while True:
                point = waiting.get_nowait()

                def play(point: Sent = point) -> Mapping[str, Any]:
                    nonlocal machine
                    here, machine = machine or self._machine(point.spec), None
                    kept = self._play(here, point)
                    machine = here  # it has answered: it takes the next point too
                    return self._brought(kept, point)

                value = attempt(self._folder, point.number, point.overrides, play, point.metric)
                self._values[point.number] = value
        except (queue.Empty, KeyboardInterrupt):
            pass
        finally:
            if machine is not None:
                machine.close()

    def _machine(self, spec: ExperimentSpec) -> SkyRunner:
        from flows.execution.executor import environment

        sweep = f"{self._folder} {socket.gethostname()} {os.getpid()} {id(self)}"  # a batch does not meet the last one
        name = f"espalier-{hashlib.sha256(sweep.encode()).hexdigest()[:8]}-{next(self._names)}"
        log = self._folder / "logs" / f"{name}.log"
        made = SkyRunner(
            self._place, name, CODE, self._packages, [], Path(spec.root), log, environment(), module=MODULE
        )
        self._machines.append(made)
        print(f"{made.name}: the log of this machine is {log}", file=sys.stderr)
        return made

    @property
    def _place(self) -> SkyPlace:
        return self._settings.places[self._settings.place]

    def _play(self, machine: SkyRunner, point: Sent) -> Artifact:
        """What the point left in the store. Raises what ends it without a word of its own."""
        spec, name = point.spec, f"point-{point.number}"
        root, sweep = Path(spec.root), self._folder.name
        parent = None if spec.tracking.uri is None else tracking.parent_run(root, spec, sweep)
        request = {
            "stage": name,
            "spec": point.data,
            "overrides": point.overrides,
            "sweep": sweep,
            "parent": parent,
        }
        print(f"{name} on {machine.name}: {' '.join(point.overrides)}", file=sys.stderr)
        answer = machine.run(request, _say)
        kept = Store(root / "artifacts", spec.store).find(answer.key)
        assert kept is not None, f"{name}: {answer.key} is not in {spec.store}"
        print(f"{name} has ended", file=sys.stderr)
        return kept

    def _brought(self, kept: Artifact, point: Sent) -> dict[str, Any]:
        """The result line; record and report are put where they are looked for. Raises the point's own error."""
        outcome = read_json(kept.path / OUTCOME)
        root = Path(point.spec.root)
        result = outcome.get("result")
        if result is not None:
            result["export"] = None  # a folder there; the store has it
            if point.spec.tracking.uri is None:  # the registry was there too
                result["model"] = result["champion"] = None
            if (kept.path / REPORT).is_file():
                page = self._folder / "reports" / f"{point.number:04}.html"
                page.parent.mkdir(exist_ok=True)
                shutil.copy(kept.path / REPORT, page)
                result["report"] = str(page)
        for run in Records(kept.path).all():
            run.spec["root"] = str(root)
            run.result = run.result and result
            Records(root).write(run)
        if "error" in outcome:
            error = outcome["error"]
            raise full_disk(error["message"], self._place, "the point") or error_from_json(error)
        return result


def _say(event: Mapping[str, Any]) -> None:
    if "waiting" in event:
        print(f"  {event['waiting']}", file=sys.stderr)
