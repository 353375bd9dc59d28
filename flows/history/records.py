"""What each run did: one JSON file a run, below `<root>/records/`, written anew after each stage.

MLflow shows runs to people. These records are what the other commands read (`flows.plan`, `flows.compare`,
`flows.clean`, `flows.stage --run`): which stages a run has, by label; the request of each, from which it can be run
again; the key of what it left in the store. They need no MLflow, and reading them takes milliseconds.

A run that lives holds a lock beside its record. A record that says RUNNING and whose lock is free belongs to a run that
was killed: no clock and no process id has to be believed for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import TypeAdapter, ValidationError

from components.artifacts.names import is_key
from components.errors import ResourceError
from components.json_text import parse_json
from components.redaction import mask
from components.specs import nearest
from flows.terminal.console import printable
from flows.terminal.overrides import mask_overrides

_POLICY_TRAINING = re.compile(r"train\[(sft|feedback|\d+)\]")

logger = logging.getLogger(__name__)

VERSION = 1
FOLDER = "records"
LATEST = "latest"
SHORTEST = 4
"""Fewest characters of an id that are taken for one."""


@dataclass(frozen=True)
class StageRecord:
    """One stage of a run."""

    label: str
    """Its name in the run: `train[3]`."""
    step: int
    """Round r is step r; what comes before the rounds 0, before a warmup -1."""
    request: dict[str, Any]
    """`flows.stages.base.Request` as JSON: runs the stage again."""
    version: int
    """Version of the stage."""
    key: str
    digest: str
    kind: str
    status: str
    """`ran` or `cached`."""
    seconds: float
    """Time that it took in this run."""
    cost: float = 0.0
    """What it cost in this run: judges and machines, in the currency of their prices."""
    unnoticed: float = 0.0
    """Seconds of it in which another stage ran that the run would have waited for anyway."""

    @property
    def waited(self) -> float:
        """Seconds that the run waited for it."""
        return self.seconds - self.unnoticed


GuardName = Literal[
    "no_signal",
    "reward_hacking",
    "heldout_reward",
    "length_drift",
    "repetition_drift",
    "identical_answers",
    "ensemble_disagreement",
]


@dataclass(frozen=True)
class Shown:
    """An episode that shows what was found."""

    label: str
    """The stage that played it: `collect[3]`."""
    id: str
    why: str
    """What it shows, and its reward."""
    excerpt: str
    """The beginning of what the policy said."""


@dataclass(frozen=True)
class Notice:
    """Something that was found in the course of a run, beyond its stages."""

    kind: GuardName | Literal["early_stopping", "pruned", "best", "rejected", "champion", "deployment"]
    """A guard; the end of the rounds before their number, or by the sweep; the choice of the final policy; a person's
    no to it; whether it is champion; where it was deployed."""
    step: int
    message: str
    episodes: list[Shown] = field(default_factory=list)
    """Those that show it best."""


@dataclass
class RunRecord:
    """One run."""

    id: str
    """Its id in MLflow."""
    name: str
    """Name of the experiment."""
    seed: int
    started: float
    """Seconds since the epoch, by the clock of the machine."""
    status: str = "RUNNING"
    """RUNNING, FINISHED, PRUNED by a sweep, FAILED or KILLED."""
    ended: float | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    """The composed configuration; secrets are masked."""
    overrides: list[str] = field(default_factory=list)
    sweep: str | None = None
    forked: dict[str, str] = field(default_factory=dict)
    """Of a fork: step and key of the checkpoints of the other run that it began with."""
    git_commit: str | None = None
    prefect_flow_run: str = ""
    """Its id in Prefect, once it has begun there."""
    process: str = ""
    """Where it ran, for people: `process 123 on host`."""
    stages: list[StageRecord] = field(default_factory=list)
    """In the order in which they ended."""
    notices: list[Notice] = field(default_factory=list)
    result: dict[str, Any] | None = None
    """The result line of a run that finished."""

    @property
    def short(self) -> str:
        return self.id[:8]

    def stage(self, label: str) -> StageRecord:
        """Raises ResourceError where the run has no such stage."""
        for one in self.stages:
            if one.label == label:
                return one
        known = ", ".join(one.label for one in self.stages) or "none yet"
        raise ResourceError(f"run {self.short} has no stage {label!r}; it has: {known}")


class Records:
    """The records below one root."""

    def __init__(self, root: str | Path):
        self.root = Path(root).absolute()
        self.folder = self.root / FOLDER

    def all(self) -> list[RunRecord]:
        """Every run, the latest first. Raises ResourceError for a record of a newer version; one that cannot be read is
        left out with a warning."""
        found = [self._read(path) for path in self.folder.glob("*.json")]
        return sorted(
            (record for record in found if record is not None),
            key=lambda record: (record.started, record.id),
            reverse=True,
        )

    def get(self, reference: str, ignore: Callable[[RunRecord], bool] = lambda run: False) -> RunRecord:
        """The run that `reference` names: its id, the beginning of it, an experiment's name (its latest run), or
        `latest`. ignore: runs that are not meant. Raises ResourceError where there is none, or where several begin
        so."""
        runs = [run for run in self.all() if not ignore(run)]
        if not runs:
            raise ResourceError(f"there is no run below {self.root} yet; give the folder of your runs: root=DIR")
        if reference == LATEST:
            return runs[0]
        exact = [run for run in runs if run.id == reference] or [run for run in runs if run.name == reference][:1]
        started = [run for run in runs if len(reference) >= SHORTEST and run.id.startswith(reference)]
        found = exact or started
        if len(found) == 1:
            return found[0]
        listed = "\n".join(f"  {self.describe(run)}" for run in (found or runs)[:10])
        if found:
            raise ResourceError(f"{reference!r} is the beginning of several runs; give more of the id:\n{listed}")
        if reference and any(run.id.startswith(reference) for run in runs):
            raise ResourceError(f"{reference!r} is too short for an id; give at least {SHORTEST} characters:\n{listed}")
        near = nearest(reference, [run.name for run in runs])
        meant = f" (did you mean {near}?)" if near else ""
        raise ResourceError(f"there is no run {reference!r} below {self.root}{meant}. There are:\n{listed}")

    def describe(self, run: RunRecord) -> str:
        """One line about a run."""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
        overrides = " ".join(one for one in run.overrides if not one.startswith("root="))
        return printable(f"{run.short}  {when}  {run.name} seed {run.seed}  {self.status(run)}  {overrides}".rstrip())

    def status(self, run: RunRecord) -> str:
        """running, finished, pruned, failed or killed. A run that was killed says itself that it runs, until the next
        run closes it."""
        return "killed" if run.status == "RUNNING" and not self.alive(run) else run.status.lower()

    def dead(self) -> list[RunRecord]:
        """Runs that were killed: their record says RUNNING, and nobody holds their lock."""
        return [run for run in self.all() if run.status == "RUNNING" and not self.alive(run)]

    def alive(self, run: RunRecord) -> bool:
        """Whether the process of a run still lives."""
        try:
            with open(self._lock(run.id)) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def write(self, run: RunRecord) -> None:
        """Replaces the record of a run, all at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f".{run.id}.{os.getpid()}.part"
        part.write_text(json.dumps({"version": VERSION, **asdict(run)}, indent=1, ensure_ascii=False) + "\n")
        part.replace(self.folder / f"{run.id}.json")

    def last_sign(self, run: RunRecord) -> float:
        """When a run last wrote its record, in seconds since the epoch."""
        return (self.folder / f"{run.id}.json").stat().st_mtime

    def close(self, run: RunRecord) -> None:
        """Writes down that a run was killed, when it last wrote."""
        run.status = "KILLED"
        run.ended = self.last_sign(run)
        self.write(run)

    def forget(self, run: RunRecord) -> None:
        """Removes the record of a run; its artifacts stay."""
        (self.folder / f"{run.id}.json").unlink(missing_ok=True)
        self._lock(run.id).unlink(missing_ok=True)

    def hold(self, run_id: str) -> IO[str]:
        """The lock of a living run; held until the file is closed or the process ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = open(self._lock(run_id), "a+")  # noqa: SIM115  the caller's to close
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def _lock(self, run_id: str) -> Path:
        return self.folder / f".{run_id}.lock"

    def _read(self, path: Path) -> RunRecord | None:
        try:
            data = parse_json(path.read_bytes())
            version = data.get("version") if isinstance(data, dict) else None
            if isinstance(version, int) and version > VERSION:
                raise ResourceError(f"{path} was written by a newer Espalier: update, or give another root=DIR")
            return _run(data, path.stem)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            why = f"{'.'.join(map(str, first['loc']))!a}: {first['msg']}"
        except ValueError as error:
            why = str(error)
        logger.warning("%s is no record of a run and is left out: %s", path, why)
        return None


def _run(data: Any, name: str) -> RunRecord:
    """The record that the data describe. Raises ValueError where a value is of another form, for others may have
    written to the folder: ids and keys become parts of paths."""
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ValueError(f"expected an object with version {VERSION}")
    run = TypeAdapter(RunRecord).validate_python({key: value for key, value in data.items() if key != "version"})
    if run.id != name or not is_key(run.id):
        raise ValueError(f"it is the record of another run: {run.id[:50]!a}")
    for stage in run.stages:
        request = stage.request
        inputs = request.get("inputs")
        if (
            not isinstance(inputs, dict)
            or not isinstance(request.get("spec"), dict)
            or not {"stage", "seed"} <= set(request)
        ):
            raise ValueError(f"the request of {stage.label[:50]!a} has no stage, spec or inputs")
        if not all(is_key(key) for key in (stage.key, *inputs.values())):
            raise ValueError(f"{stage.label[:50]!a} names an artifact by something that is no key")
    return run


class Writer:
    """Writes the record of the run that goes on; a context manager for its whole life."""

    def __init__(self, records: Records, run: RunRecord):
        self.records = records
        self.run = run

    def add(self, stage: StageRecord) -> None:
        """A stage has ended."""
        self.run.stages.append(stage)
        self.records.write(self.run)

    def begun(self, flow_run: str) -> None:
        """The run has begun in Prefect, under this id. Written at once: whoever is killed from now on has to be closed
        there."""
        self.run.prefect_flow_run = flow_run
        self.records.write(self.run)

    def note(self, notice: Notice) -> None:
        self.run.notices.append(notice)
        self.records.write(self.run)

    def finish(self, status: str) -> None:
        self.run.status = status
        self.run.ended = time.time()
        self.records.write(self.run)


@contextlib.contextmanager
def recording(
    root: Path,
    run_id: str,
    *,
    name: str,
    seed: int,
    spec: Mapping[str, Any],
    overrides: Sequence[str],
    sweep: str | None,
    git_commit: str | None,
    forked: Mapping[str, str],
) -> Iterator[Writer]:
    """The record of a run while it goes on: FINISHED, PRUNED, FAILED, or KILLED by Ctrl-C, at the end."""
    records = Records(root)
    run = RunRecord(
        run_id,
        name,
        seed,
        time.time(),
        spec=mask(dict(spec)),
        overrides=mask_overrides(overrides),
        sweep=sweep,
        git_commit=git_commit,
        forked=dict(forked),
        process=f"process {os.getpid()} on {socket.gethostname()}",
    )
    writer = Writer(records, run)
    with records.hold(run_id):
        records.write(run)
        status = "FAILED"
        try:
            yield writer
            status = "PRUNED" if run.result and run.result["pruned"] else "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            writer.finish(status)


def checkpoints(run: RunRecord) -> dict[int, str]:
    """Return the keys of the checkpoints of a run by step; of a fork, including the step where it begins."""
    begun = {int(step): key for step, key in run.forked.items()}
    return begun | {one.step: one.key for one in run.stages if _POLICY_TRAINING.fullmatch(one.label)}
