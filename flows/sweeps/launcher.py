"""Launcher of `hydra/launcher=sky`: each point of a sweep, a whole run, is a job on a SkyPilot machine.

`n_jobs` machines of one place take points from a queue. On a machine, `flows.sweeps.elsewhere` runs a point. Its result
or error, the record of its run and its report return through the store and are copied to the paths of a local point,
so that table, comparison and search need no special case. Everything else is as for stages on such machines
(`components.compute.sky`): the code is sent as a snapshot, a preempted machine is launched again, and all machines are
stopped when the sweep ends, also after an error.

An error of the machine (launch failed, job ended without a result) stops it, and the next point gets a new machine. If
only the point fails, its machine takes the next point.
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
from components.compute.runners import StageProcess, error_from_json
from components.compute.sky.failures import full_disk
from components.compute.sky.runner import SkyRunner
from components.compute.sky.spec import SkyPlace
from components.json_text import read_json
from components.specs import validate
from flows.execution import tracking
from flows.experiment.spec import ExperimentSpec
from flows.experiment.sweep_settings import TRIAL, LauncherSpec, default_objective, optuna_settings
from flows.history.records import Records
from flows.sweeps.elsewhere import OUTCOME, REPORT
from flows.sweeps.points import attempt
from flows.terminal.arguments import CODE

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext
    from omegaconf import DictConfig

MODULE = "flows.sweeps.elsewhere"


@dataclass(frozen=True)
class RemotePoint:
    """Point of a sweep that runs on another machine."""

    number: int
    overrides: list[str]
    metric: str
    spec: ExperimentSpec
    data: dict[str, Any]
    """Composed configuration of the spec; the remote machine validates it again."""


def launch(
    settings: LauncherSpec, config: DictConfig, context: HydraContext, points: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Run the points and wait for all of them. Outcomes are recorded in the points' files. Raises KeyboardInterrupt."""
    from hydra.core.utils import JobReturn, JobStatus

    folder = Path(config.hydra.sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    remote_points = [
        _compose_point(config, context, overrides, first + index) for index, overrides in enumerate(points)
    ]
    if remote_points[0].spec.tracking.uri is None:
        print(
            "tracking.uri = null: MLflow's runs and model registry stay on the machines of the points; only records "
            "and reports are copied back. To keep them, set tracking.uri to an MLflow server",
            file=sys.stderr,
        )
    packages = sorted({name for point in remote_points for name in point.spec.allow})
    values = SweepMachines(settings, folder, packages).run(remote_points)
    return [
        JobReturn(point.overrides, task_name="run", status=JobStatus.COMPLETED, _return_value=values[point.number])
        for point in remote_points
    ]


def _compose_point(config: DictConfig, context: HydraContext, overrides: Sequence[str], number: int) -> RemotePoint:
    from omegaconf import OmegaConf, open_dict

    point = context.config_loader.load_sweep_config(config, list(overrides))
    lines = list(point.hydra.overrides.task)
    sweeper: Any = OmegaConf.to_container(point.hydra.sweeper, resolve=False)
    trial = sweeper.pop(TRIAL, None)
    search = optuna_settings({"sweeper": sweeper})
    with open_dict(point):
        del point["hydra"]
    data: Any = OmegaConf.to_container(point, resolve=True)
    metric = search.metric if search else default_objective(data.get("environment"))[0]
    return RemotePoint(number if trial is None else trial, lines, metric, validate(ExperimentSpec, data), data)


class SweepMachines:
    """Machines of a sweep. folder: the sweep's folder. packages: user packages that are sent along."""

    def __init__(self, settings: LauncherSpec, folder: Path, packages: Sequence[str]):
        self._settings = settings
        self._folder = folder
        self._packages = packages
        self._names = itertools.count()
        self._machines: list[SkyRunner] = []
        self._values: dict[int, float] = {}

    def run(self, points: Sequence[RemotePoint]) -> dict[int, float]:
        """Run the points and return the results of `attempt` by number of the point. Raises KeyboardInterrupt, after
        which the machines stop even if this process ends."""
        pending: queue.SimpleQueue[RemotePoint] = queue.SimpleQueue()
        for point in points:
            pending.put(point)
        threads = [
            threading.Thread(target=self._serve, args=(pending,), name=f"points-{number}", daemon=True)
            for number in range(min(self._settings.n_jobs, len(points)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():  # a join without timeout would block Ctrl-C
                    thread.join(0.5)
        except KeyboardInterrupt:
            for machine in self._machines:
                machine.stop()
            raise
        return self._values

    def _serve(self, pending: queue.SimpleQueue[RemotePoint]) -> None:
        """Run pending points on one machine at a time until the queue is empty."""
        machine: SkyRunner | None = None
        try:
            while True:
                point = pending.get_nowait()

                def play(point: RemotePoint = point) -> Mapping[str, Any]:
                    nonlocal machine
                    current, machine = machine or self._machine(point.spec), None
                    artifact = self._play(current, point)
                    machine = current  # it has responded, so it takes the next point too
                    return self._import(artifact, point)

                value = attempt(self._folder, point.number, point.overrides, play, point.metric)
                self._values[point.number] = value
        except (queue.Empty, KeyboardInterrupt):
            pass
        finally:
            if machine is not None:
                machine.close()

    def _machine(self, spec: ExperimentSpec) -> SkyRunner:
        from flows.execution.executor import environment

        sweep = f"{self._folder} {socket.gethostname()} {os.getpid()} {id(self)}"  # unique per batch
        name = f"espalier-{hashlib.sha256(sweep.encode()).hexdigest()[:8]}-{next(self._names)}"
        log = self._folder / "logs" / f"{name}.log"
        process = StageProcess(Path(spec.root), log, environment(), module=MODULE)
        machine = SkyRunner(self._place, name, CODE, self._packages, process)
        self._machines.append(machine)
        print(f"{machine.name}: log of this machine: {log}", file=sys.stderr)
        return machine

    @property
    def _place(self) -> SkyPlace:
        return self._settings.places[self._settings.place]

    def _play(self, machine: SkyRunner, point: RemotePoint) -> Artifact:
        """Run the point on a machine and return its artifact. Raises errors of the machine, not of the point."""
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
        response = machine.run(request, _show_event)
        artifact = Store(root / "artifacts", spec.store).find(response.key)
        assert artifact is not None, f"{name}: {response.key} is not in {spec.store}"
        print(f"{name} has ended", file=sys.stderr)
        return artifact

    def _import(self, artifact: Artifact, point: RemotePoint) -> dict[str, Any]:
        """Copy the point's record and report to their local paths and return its result line. Raises the point's
        error."""
        outcome = read_json(artifact.path / OUTCOME)
        root = Path(point.spec.root)
        result = outcome.get("result")
        if result is not None:
            result["export"] = None  # a folder on the machine; the store has the export
            if point.spec.tracking.uri is None:  # the registry is on the machine, too
                result["model"] = result["champion"] = None
            if (artifact.path / REPORT).is_file():
                page = self._folder / "reports" / f"{point.number:04}.html"
                page.parent.mkdir(exist_ok=True)
                shutil.copy(artifact.path / REPORT, page)
                result["report"] = str(page)
        for run in Records(artifact.path).all():
            run.spec["root"] = str(root)
            run.result = run.result and result
            Records(root).write(run)
        if "error" in outcome:
            error = outcome["error"]
            raise full_disk(error["message"], self._place, "the point") or error_from_json(error)
        return result


def _show_event(event: Mapping[str, Any]) -> None:
    if "waiting" in event:
        print(f"  {event['waiting']}", file=sys.stderr)
