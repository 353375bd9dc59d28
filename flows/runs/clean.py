"""`python -m flows.runs clean`: garbage collection of the folder of the runs; deletes only with `--delete`.

An artifact is needed if it belongs to a stage of a recorded run (or is the start of a fork), or is an ancestor of such
an artifact. The command lists everything else with the reason and the size:

- artifacts that no run needs;
- damaged artifacts, drafts of dead processes, partial results of stages that have finished since;
- states, requests and checkpoints of the training service that no client needs (`flows.train_service.retention`),
  unless the service is running;
- with `--intermediate`: intermediate checkpoints of finished runs. A run always keeps its latest checkpoint, the one
  selected as its final policy, and its best ones: for each metric that it tracks (held-out evaluations of the rounds
  included), the checkpoints with the lowest and the highest value. If a later run needs a deleted checkpoint, it
  recomputes it and everything that depends on it.

Artifacts that a version in MLflow's registry or a deployment points to are retained even if no run needs them
(`flows.release.retention`). `--forget-champion` releases them for the runs of `--forget` and for artifacts given as
KEY; their versions are then marked as deleted in MLflow. Runs of `--forget` are marked as deleted there, too, except
those whose version is retained.

Cached answers of judges are shared by all runs below the root and are retained. `--answers` includes them, provided
that no run is running; the same questions then cost again.

`--forget RUN` drops a run's record first, so that artifacts which only this run needs can be deleted. KEY deletes
single artifacts and is refused if a run needs them. Files in use by a live process are never touched.
"""

from __future__ import annotations

import fcntl
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from components.artifacts import Artifact, Store, read_artifact
from components.errors import ArtifactError, EspalierError, ResourceError
from flows.history.records import Records, RunRecord
from flows.release.retention import Retention
from flows.stages.judge import ANSWERS
from flows.stages.shard import SHARD
from flows.terminal.arguments import RootParser
from flows.terminal.exit_codes import print_message
from flows.train_service.retention import FOLDER, LOCK, unneeded

KEY_LENGTH = 64
"""Characters of a stage key (sha256, hex)."""


_IN_ROUNDS = re.compile(r"evaluate\[\d+\]")


@dataclass(frozen=True)
class DeletableEntry:
    """File or folder that can be deleted."""

    path: str
    kind: str
    """Kind of the artifact, or of other data."""
    why: str
    bytes: int


class Cleaner:
    """Garbage collector of one root.

    forget: runs whose artifacts are no longer needed. give_up: also release artifacts that versions in MLflow's
    registry and deployments point to, for these runs and for artifacts given by key.
    """

    def __init__(self, root: Path, forget: Sequence[str] = (), *, give_up: bool = False):
        self.root = root.absolute()
        self.records = Records(self.root)
        self.store = Store(self.root / "artifacts")
        self.forgotten = [self.records.get(reference) for reference in forget]
        for run in self.forgotten:
            if self.records.alive(run):
                raise ResourceError(f"--forget: run {run.short} is running ({run.process}); stop it first")
        forgotten_ids = {run.id for run in self.forgotten}
        recorded = self.records.all()
        self.runs = [run for run in recorded if run.id not in forgotten_ids]
        self.retention = Retention(self.root, recorded, self.forgotten, give_up)
        self.artifacts = {artifact.key: artifact for artifact in self._artifacts()}
        self.needed_by = self._needed_by()

    def deletable(self, *, intermediate: bool = False, answers: bool = False) -> list[DeletableEntry]:
        """Return everything that can be deleted, largest first. Raises ResourceError if `answers` is set while a run is
        running."""
        deletable = [*self._unneeded(), *self._debris(), *self._of_clients()]
        deletable += [*self._intermediate()] if intermediate else []
        deletable += [*self._answers()] if answers else []
        return sorted(deletable, key=lambda item: (-item.bytes, item.path))

    def named(self, key: str) -> DeletableEntry:
        """Return the artifact with this key or key prefix. Raises ResourceError if there is none, the prefix is
        ambiguous, a run needs it, or it is retained."""
        matches = [artifact for artifact in self.artifacts.values() if artifact.key.startswith(key)]
        if len(matches) != 1:
            raise ResourceError(
                f"KEY {key!r}: {len(matches)} artifacts in {self.store.root} have this prefix; expected exactly 1"
            )
        artifact = matches[0]
        if artifact.key in self.needed_by:
            users = self.needed_by[artifact.key]
            listed = ", ".join(f"run {run.short} ({run.name}) for {label}" for run, label in users)
            raise ResourceError(
                f"{artifact.kind} {artifact.key[:12]} is in use by {listed}. To delete "
                f"{'the run' if len(users) == 1 else 'these runs'} too: "
                f"{' '.join(f'--forget {run.short}' for run, _ in users)}"
            )
        for holder in self.retention.holders:
            if artifact.key in holder.keys and not self.retention.give_up:
                raise ResourceError(
                    f"{artifact.kind} {artifact.key[:12]} is retained: {holder.why}. To delete it anyway: "
                    "--forget-champion"
                )
        return _entry(artifact, "named")

    def retained(self) -> list[DeletableEntry]:
        """Return artifacts that no run needs, but a version or a deployment points to."""
        unneeded = [artifact for artifact in self.artifacts.values() if artifact.key not in self.needed_by]
        holders = self.retention.retained if unneeded else {}
        return [_entry(artifact, holders[artifact.key].why) for artifact in unneeded if artifact.key in holders]

    def delete(self, deletable: Iterable[DeletableEntry]) -> list[DeletableEntry]:
        """Delete files and return those deleted; files that a live process has locked since are skipped.

        Raises ResourceError, before anything is deleted, if MLflow refuses or a server has an export loaded.
        """
        deletable, deleted = list(deletable), []
        if deletable or self.forgotten:  # before any file is deleted: no version may point to a missing artifact
            self.retention.forget(self.retention.holders_of(_keys(deletable)))
        for item in deletable:
            path = Path(item.path)
            with _unused(self._lock(path)) as free:
                if not free:
                    continue
                if len(path.name) == KEY_LENGTH and path.parent == self.store.root:
                    trash = self.store.root / ".drafts" / f"{path.name}.gone"
                    trash.parent.mkdir(exist_ok=True)
                    shutil.rmtree(trash, ignore_errors=True)
                    path.rename(trash)  # atomic: a partially deleted artifact must not be visible in the store
                    path = trash
                path.unlink() if path.is_file() else shutil.rmtree(path)
                deleted.append(item)
        for run in self.forgotten:
            self.records.forget(run)
        return deleted

    def _artifacts(self) -> Iterator[Artifact]:
        for path in self.store.root.glob("?" * KEY_LENGTH):
            try:
                yield read_artifact(path, verify=False)
            except ArtifactError:
                continue  # damaged; the next run that reads it moves it away

    def _needed_by(self) -> dict[str, list[tuple[RunRecord, str]]]:
        """Return, by key of each needed artifact, the runs that need it, latest first, each with one such stage."""
        needed: dict[str, list[tuple[RunRecord, str]]] = {}

        def need(key: str, run: RunRecord, label: str) -> None:
            users = needed.setdefault(key, [])
            if users and users[-1][0] is run:
                return
            users.append((run, label))
            for input_key in self.artifacts[key].inputs.values() if key in self.artifacts else ():
                need(input_key, run, label)

        for run in self.runs:
            for stage in run.stages:
                need(stage.key, run, stage.label)
            for step, key in run.forked.items():
                need(key, run, f"its beginning at step {step}")
        return needed

    def _unneeded(self) -> Iterator[DeletableEntry]:
        unneeded = [artifact for artifact in self.artifacts.values() if artifact.key not in self.needed_by]
        retained = self.retention.retained if unneeded else {}
        oldest_start = min((run.started for run in self.runs if self.records.alive(run)), default=math.inf)
        for artifact in unneeded:
            new = artifact.path.stat().st_mtime >= oldest_start  # a live run may be about to record it
            new = new or (artifact.stage == SHARD and oldest_start < math.inf)  # or to join it
            if artifact.key not in retained and not new:
                yield _entry(artifact, "no run needs it")

    def _debris(self) -> Iterator[DeletableEntry]:
        for path in self.store.root.glob("*.damaged-*"):
            yield DeletableEntry(
                str(path), "damaged artifact", "does not match its manifest; was moved away", _size(path)
            )
        for path in (self.store.root / ".drafts").glob("*"):
            with _unused(self.store.root / ".locks" / path.name.partition(".")[0]) as free:
                if free:
                    why = "its process is dead; finished episodes and steps are stored elsewhere"
                    yield DeletableEntry(str(path), "draft", why, _size(path))
        for path in (self.store.root / ".scratch").glob("*"):
            if path.name in self.artifacts:
                yield DeletableEntry(str(path), "unfinished work", "the stage has finished since", _size(path))
        for path in self.root.glob(".again-*"):
            yield DeletableEntry(str(path), "repeated stage", "its process is dead", _size(path))

    def _of_clients(self) -> Iterator[DeletableEntry]:
        folder = self.root / FOLDER
        with _unused(folder / LOCK) as free:
            if not free:
                print_message(f"{folder} is in use by the training service; stop it to clean, its clients wait for it")
                return
            for item in unneeded(folder, {run.id for run in self.runs}):
                yield DeletableEntry(str(item.path), item.kind, item.why, _size(item.path))

    def _lock(self, path: Path) -> Path:
        """Return the lock file of the process that may use a file or folder."""
        if path.is_relative_to(self.root / FOLDER):
            return self.root / FOLDER / LOCK
        return self.store.root / ".locks" / path.name

    def _answers(self) -> Iterator[DeletableEntry]:
        folder = self.root / ANSWERS
        for run in self.runs:
            if self.records.alive(run):
                raise ResourceError(f"--answers: run {run.short} is running ({run.process}); stop it first")
        if folder.is_dir():
            yield DeletableEntry(str(folder), "answers of judges", "the same questions will cost again", _size(folder))

    def _intermediate(self) -> Iterator[DeletableEntry]:
        excluded = {key for run in self.runs for key in _worth_keeping(run, self.artifacts)}
        excluded.update(key for holder in self.retention.holders for key in holder.keys)
        for run in self.runs:
            for stage in run.stages:
                artifact = self.artifacts.get(stage.key)
                if stage.kind == "checkpoint" and artifact is not None and artifact.key not in excluded:
                    excluded.add(artifact.key)  # list it once, even if several runs share it
                    yield _entry(artifact, f"{stage.label} of run {run.short}: neither its latest nor its best")


def _worth_keeping(run: RunRecord, artifacts: dict[str, Artifact]) -> set[str]:
    """Return the keys of the checkpoints that `--intermediate` retains.

    For an unfinished run: all. For a finished run: its initial checkpoint, the start of its rounds, its latest and its
    final one, and for each metric of a round those of the rounds with the lowest and the highest value.
    """
    checkpoints = [stage for stage in run.stages if stage.kind == "checkpoint"]
    initial = {run.forked[step] for step in [*sorted(run.forked, key=int)[-1:], "0"] if step in run.forked}
    keys = {*initial, *(stage.key for stage in checkpoints if stage.step <= 0)}
    keys |= {
        key
        for stage in run.stages
        if not _IN_ROUNDS.fullmatch(stage.label)  # evaluations within the rounds count through their metrics, below
        for key in _policies(stage.request["inputs"], stage.kind)
    }
    if run.status != "FINISHED":
        return keys | {stage.key for stage in checkpoints}
    if not checkpoints:
        return keys
    keys.add(checkpoints[-1].key)
    by_step = {stage.step: stage.key for stage in checkpoints}
    values: dict[str, list[tuple[float, str]]] = {}
    for stage in run.stages:
        artifact = artifacts.get(stage.key)
        # Episodes collected and judged in round r come from the policy of round r - 1.
        policy = stage.step if stage.kind in ("checkpoint", "evaluation") else stage.step - 1
        if (
            artifact is None or policy not in by_step or "[reward" in stage.label
        ):  # reward model stages run between rounds
            continue
        for name, value in artifact.metrics.items():
            values.setdefault(f"{stage.kind}/{name}", []).append((value, by_step[policy]))
    for points in values.values():
        lowest, highest = min(value for value, _ in points), max(value for value, _ in points)
        if lowest < highest:
            keys |= {next(key for value, key in points if value == best) for best in (lowest, highest)}
    return keys


def _policies(inputs: dict[str, str], kind: str) -> list[str]:
    """Return the keys of the checkpoints that an evaluation or an export used."""
    return [key for name, key in inputs.items() if name == "policy" and kind in ("evaluation", "export")]


class _unused:
    """Non-blocking lock on a file: True if no process holds it. Inside the block it stays locked."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> bool:
        self._file = open(self._path) if self._path.exists() else None
        if self._file is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _entry(artifact: Artifact, why: str) -> DeletableEntry:
    return DeletableEntry(str(artifact.path), artifact.kind, why, artifact.size)


def _keys(deletable: Iterable[DeletableEntry]) -> set[str]:
    """Return the names of folders in the store."""
    return {Path(item.path).name for item in deletable}


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 if it cannot be done."""
    parser = RootParser(
        prog="python -m flows.runs clean",
        description="Lists unneeded files below a root, with the reasons. Deletes only with --delete.",
    )
    parser.add_argument("keys", nargs="*", metavar="KEY", help="only these artifacts; refused if a run needs one")
    parser.add_argument(
        "--forget",
        action="append",
        default=[],
        metavar="RUN",
        help="drop the record of this run, so that its artifacts are no longer needed; may be repeated",
    )
    parser.add_argument(
        "--forget-champion",
        action="store_true",
        help="with --forget or KEY: also artifacts of registered and deployed versions, which MLflow marks as deleted",
    )
    parser.add_argument("--intermediate", action="store_true", help="also checkpoints that are neither latest nor best")
    parser.add_argument("--answers", action="store_true", help="also the cached answers of judges")
    parser.add_argument("--delete", action="store_true", help="delete the listed files (default: only list them)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_intermixed_args(argv)
    if options.forget_champion and not (options.forget or options.keys):
        parser.error("--forget-champion requires --forget RUN or KEY")
    try:
        if not any((options.root / name).is_dir() for name in ("artifacts", FOLDER)):
            raise ResourceError(f"root={options.root}: no artifacts there; expected the folder of your runs, root=DIR")
        cleaner = Cleaner(options.root, options.forget, give_up=options.forget_champion)
        if options.keys:
            deletable = [cleaner.named(key) for key in options.keys]
        else:
            deletable = cleaner.deletable(intermediate=options.intermediate, answers=options.answers)
        retained = [] if options.keys else cleaner.retained()
        dropped = cleaner.retention.holders_of(_keys(deletable)) if deletable else []
        runs = [run for run, _ in cleaner.retention.unregistered_runs(dropped)] if cleaner.forgotten else []
        deleted = cleaner.delete(deletable) if options.delete else []
    except EspalierError as error:
        print_message(error)
        return 2
    if options.json:
        listed = {
            "deletable": [asdict(item) for item in (deleted or deletable)],
            "retained": [asdict(item) for item in retained],
        }
        print(json.dumps({"deleted": options.delete, **listed}))
        return 0
    for item in deletable:
        print(f"{item.bytes / 1e6:10.1f} MB  {item.kind}  {Path(item.path).name[:20]}  {item.why}")
    total = sum(item.bytes for item in deletable) / 1e6
    for item in retained:
        print(f"{item.kind} {Path(item.path).name[:20]} is retained: {item.why}")
    if retained:
        print("to delete retained artifacts, add --forget-champion to --forget RUN or KEY")
    records = "".join(f", and the record of run {run.short}" for run in cleaner.forgotten)
    for run in cleaner.forgotten:
        print(f"run {run.short}: artifacts that other runs still use lose the record of their origin")
        if run in runs:
            print(f"run {run.short} is marked as deleted in MLflow: mlflow runs restore --run-id {run.id}")
    for holder in dropped:
        if holder.version is not None:
            print(f"{holder.title} is deleted in MLflow's registry")
    if options.delete:
        skipped = len(deletable) - len(deleted)
        busy = f"; skipped {skipped} in use by a live process" if skipped else ""
        size = sum(item.bytes for item in deleted) / 1e6
        print(f"deleted {len(deleted)} of {len(deletable)}, {size:.1f} MB{records}{busy}")
    else:
        print(f"{len(deletable)} can be deleted, {total:.1f} MB{records}; nothing is deleted without --delete")
    return 0
