"""Records of runs: one JSON file per run below `<root>/records/`, rewritten after each stage.

MLflow shows runs to people; other commands read these records (`flows.plan`, `flows.compare`, `flows.runs clean`,
`flows.stage --run`). A record contains the stages of a run by label, with the request that reruns the stage and the key
of its artifact. Records do not need MLflow, and reading them takes milliseconds.

A live run holds a lock beside its record. A record with status RUNNING and a free lock belongs to a run that was
killed. This test relies on neither clocks nor process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import TypeAdapter, ValidationError

from components.artifacts.names import is_key
from components.errors import ResourceError
from components.json_text import parse_json, write_json
from components.redaction import mask
from components.specs import nearest
from components.specs.wording import first_problem
from flows.terminal.console import printable
from flows.terminal.overrides import mask_overrides

logger = logging.getLogger(__name__)

VERSION = 1
FOLDER = "records"
LATEST = "latest"
SHORTEST = 4
"""Minimum number of characters of an abbreviated id."""


@dataclass(frozen=True)
class StageRecord:
    """Stage of a run."""

    label: str
    """Name in the run, such as `train[3]`."""
    step: int
    """Round of the stage; 0 before the rounds, -1 before a warmup."""
    request: dict[str, Any]
    """`flows.stages.base.Request` as JSON, which reruns the stage."""
    version: int
    """Version of the stage."""
    key: str
    digest: str
    kind: str
    status: str
    """`ran` or `cached`."""
    seconds: float
    """Time that the stage took in this run."""
    cost: float = 0.0
    """Cost in this run of judges and machines, in the currency of their prices."""
    overlapped_seconds: float = 0.0
    """Seconds that overlap with another stage, for which the run did not wait."""
    code: str = ""
    """Digest of the code that computed the artifact (`flows.history.code`); empty if it is not recorded."""

    @property
    def waited(self) -> float:
        """Seconds that the run waited for the stage."""
        return self.seconds - self.overlapped_seconds


GuardName = Literal[
    "no_signal",
    "reward_hacking",
    "heldout_reward",
    "length_drift",
    "repetition_drift",
    "identical_answers",
    "ensemble_disagreement",
    "amplified_rewards",
    "judge_drift",
]


@dataclass(frozen=True)
class SampleEpisode:
    """Example episode of a notice."""

    label: str
    """Stage of the episode, such as `collect[3]`."""
    id: str
    why: str
    """Reason why the episode is an example, and its reward."""
    excerpt: str
    """Beginning of the policy's messages."""


@dataclass(frozen=True)
class Notice:
    """Finding or decision during a run."""

    kind: GuardName | Literal["early_stopping", "pruned", "best", "rejected", "champion", "deployment", "budget"]
    """A triggered guard, early stopping, pruning by the sweep, the choice of the final policy, its rejection by a
    person, the result of the champion comparison, the deployment, or 80 % of the budget spent."""
    step: int
    message: str
    episodes: list[SampleEpisode] = field(default_factory=list)
    """Example episodes."""


@dataclass
class RunRecord:
    """Record of a run."""

    id: str
    """Id in MLflow."""
    name: str
    """Name of the experiment."""
    seed: int
    started: float
    """Start in seconds since the epoch, by the clock of the machine."""
    status: str = "RUNNING"
    """RUNNING, FINISHED, PRUNED (by a sweep), FAILED or KILLED."""
    ended: float | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    """Composed configuration with masked secrets."""
    overrides: list[str] = field(default_factory=list)
    sweep: str | None = None
    forked: dict[str, str] = field(default_factory=dict)
    """Keys of the source run's checkpoints by step, if the run is a fork."""
    git_commit: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that can affect a result, by name."""
    prefect_flow_run: str = ""
    """Id of the flow run in Prefect; empty before it starts."""
    process: str = ""
    """Process of the run, for display: `process 123 on host`."""
    stages: list[StageRecord] = field(default_factory=list)
    """Finished stages, in the order in which they ended."""
    notices: list[Notice] = field(default_factory=list)
    result: dict[str, Any] | None = None
    """Result line of a finished run."""

    @property
    def short(self) -> str:
        """Abbreviated id."""
        return self.id[:8]

    def stage(self, label: str) -> StageRecord:
        """Return the stage with this label. Raises ResourceError if the run does not have it."""
        for stage in self.stages:
            if stage.label == label:
                return stage
        labels = ", ".join(stage.label for stage in self.stages) or "none yet"
        raise ResourceError(f"run {self.short} has no stage {label!r}; it has: {labels}")


def headline(result: Mapping[str, Any]) -> str:
    """Return the main result of a result line as text: the held-out success, or without an environment the loss of
    held-out rows; empty for a run that measured neither."""
    for name, title in (("success", "held-out success"), ("loss", "loss of held-out rows")):
        if (value := result.get(name)) is not None:
            return f"{title} {value:.3f}"
    return ""


class Records:
    """Records of the runs below one root."""

    def __init__(self, root: str | Path):
        self.root = Path(root).absolute()
        self.folder = self.root / FOLDER

    def all(self) -> list[RunRecord]:
        """Return all runs, latest first. Skip unreadable records with a warning. Raises ResourceError for a record of a
        newer version."""
        records = [self._read(path) for path in self.folder.glob("*.json")]
        return sorted(
            (record for record in records if record is not None),
            key=lambda record: (record.started, record.id),
            reverse=True,
        )

    def get(self, reference: str, ignore: Callable[[RunRecord], bool] = lambda run: False) -> RunRecord:
        """Return the run that `reference` names: an id, a prefix of an id, the name of an experiment (its latest run),
        or `latest`. ignore: return True for runs to skip. Raises ResourceError if no run matches, or if several ids
        have the prefix."""
        runs = [run for run in self.all() if not ignore(run)]
        if not runs:
            raise ResourceError(f"there is no run below {self.root} yet; set the folder of your runs: root=DIR")
        if reference == LATEST:
            return runs[0]
        exact = [run for run in runs if run.id == reference] or [run for run in runs if run.name == reference][:1]
        abbreviated = [run for run in runs if len(reference) >= SHORTEST and run.id.startswith(reference)]
        matches = exact or abbreviated
        if len(matches) == 1:
            return matches[0]
        listed = "\n".join(f"  {self.describe(run)}" for run in (matches or runs)[:10])
        if matches:
            raise ResourceError(f"{reference!r} is the prefix of several run ids; give more characters:\n{listed}")
        if reference and any(run.id.startswith(reference) for run in runs):
            raise ResourceError(f"{reference!r} is too short for an id; give at least {SHORTEST} characters:\n{listed}")
        near = nearest(reference, [run.name for run in runs])
        hint = f" (did you mean {near}?)" if near else ""
        raise ResourceError(f"there is no run {reference!r} below {self.root}{hint}. Runs:\n{listed}")

    def describe(self, run: RunRecord) -> str:
        """Return a line on a run."""
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
        overrides = " ".join(override for override in run.overrides if not override.startswith("root="))
        return printable(f"{run.short}  {date}  {run.name} seed {run.seed}  {self.status(run)}  {overrides}".rstrip())

    def status(self, run: RunRecord) -> str:
        """Return running, finished, pruned, failed or killed. The record of a killed run says RUNNING until the next
        run closes it."""
        return "killed" if run.status == "RUNNING" and not self.alive(run) else run.status.lower()

    def dead(self) -> list[RunRecord]:
        """Return the runs that were killed: their record says RUNNING, and their lock is free."""
        return [run for run in self.all() if run.status == "RUNNING" and not self.alive(run)]

    def alive(self, run: RunRecord) -> bool:
        """Return True if the process of a run is alive."""
        try:
            with open(self._lock(run.id)) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def write(self, run: RunRecord) -> None:
        """Replace the record of a run atomically."""
        write_json(self.folder / f"{run.id}.json", {"version": VERSION, **asdict(run)})

    def last_sign(self, run: RunRecord) -> float:
        """Return the time of the last write of a run's record, in seconds since the epoch."""
        return (self.folder / f"{run.id}.json").stat().st_mtime

    def close(self, run: RunRecord) -> None:
        """Mark a run as KILLED at the time of its last write."""
        run.status = "KILLED"
        run.ended = self.last_sign(run)
        self.write(run)

    def forget(self, run: RunRecord) -> None:
        """Delete the record, tags and notes of a run; its artifacts remain."""
        (self.folder / "labels" / f"{run.id}.json").unlink(missing_ok=True)
        (self.folder / f"{run.id}.json").unlink(missing_ok=True)
        self._lock(run.id).unlink(missing_ok=True)

    def hold(self, run_id: str) -> IO[str]:
        """Acquire and return the lock of a live run, held until the file is closed or the process ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = open(self._lock(run_id), "a+")  # noqa: SIM115  the caller closes it
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def _lock(self, run_id: str) -> Path:
        return self.folder / f".{run_id}.lock"

    def _read(self, path: Path) -> RunRecord | None:
        try:
            data = parse_json(path.read_bytes())
            version = data.get("version") if isinstance(data, dict) else None
            if isinstance(version, int) and version > VERSION:
                raise ResourceError(
                    f"{path} was written by a newer version of Espalier: update, or set another root=DIR"
                )
            return _run(data, path.stem)
        except ValidationError as error:
            reason = ascii(first_problem(error))[1:-1]
        except ValueError as error:
            reason = str(error)
        logger.warning("%s is not a valid record of a run and is skipped: %s", path, reason)
        return None


def _run(data: Any, name: str) -> RunRecord:
    """Return the record parsed from the data. Raises ValueError for an invalid value. Validation is strict, because ids
    and keys become parts of paths and other users may write to the folder."""
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ValueError(f"expected an object with version {VERSION}")
    run = TypeAdapter(RunRecord).validate_python({key: value for key, value in data.items() if key != "version"})
    if run.id != name or not is_key(run.id):
        raise ValueError(f"id = {run.id[:50]!a}; expected the name of the file")
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
            raise ValueError(f"{stage.label[:50]!a} has an invalid artifact key")
    return run


class RecordWriter:
    """Writer of the record of the current run."""

    def __init__(self, records: Records, run: RunRecord):
        self.records = records
        self.run = run

    def add(self, stage: StageRecord) -> None:
        """Add a finished stage."""
        self.run.stages.append(stage)
        self.records.write(self.run)

    def begun(self, flow_run: str) -> None:
        """Set the id of the flow run in Prefect. Written immediately: if the run is killed, Prefect must be updated."""
        self.run.prefect_flow_run = flow_run
        self.records.write(self.run)

    def note(self, notice: Notice) -> None:
        """Add a notice."""
        self.run.notices.append(notice)
        self.records.write(self.run)

    def finish(self, status: str) -> None:
        """Set the final status and the end of the run."""
        self.run.status = status
        self.run.ended = time.time()
        self.records.write(self.run)


@contextlib.contextmanager
def recording(root: Path, run: RunRecord) -> Iterator[RecordWriter]:
    """Provide the writer of a run's record, whose secrets it masks. The final status is FINISHED, PRUNED, FAILED, or
    KILLED after Ctrl-C."""
    records = Records(root)
    run.spec, run.overrides = mask(run.spec), mask_overrides(run.overrides)
    run.process = f"process {os.getpid()} on {socket.gethostname()}"
    writer = RecordWriter(records, run)
    with records.hold(run.id):
        records.write(run)
        status = "FAILED"
        try:
            yield writer
            status = "PRUNED" if run.result and run.result.get("pruned") else "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            writer.finish(status)


def checkpoints(run: RunRecord) -> dict[int, str]:
    """Return the keys of a run's checkpoints by step; for a fork, including the starting step."""
    inherited = {int(step): key for step, key in run.forked.items()}
    return inherited | {stage.step: stage.key for stage in run.stages if stage.request["stage"] == "train"}
