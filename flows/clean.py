"""`python -m flows.clean`: what below a root can go, and why; with `--delete` it goes.

Needed is every artifact that a recorded run has as one of its stages (or began with, for a fork), and whatever those
were made from. What is left is shown with its reason and its size:

- artifacts that no run needs;
- damaged artifacts that were set aside, drafts of dead processes, unfinished work of stages that are done since;
- with `--intermediate`: checkpoints in the middle of finished runs, never the latest of a run, never the one that it
  chose as its final policy, and never its best one by any metric that the run tracks, the lowest and the highest of
  each (held-out ones of evaluations in the rounds too). A run that misses one of them later makes it
  again, with what comes after it.

What a version in MLflow's registry or a deployment points to is kept, though no run needs it
(`flows.release.retention`). `--forget-champion` gives it up for the runs of `--forget` and for what is named as KEY:
the versions are then marked as deleted in MLflow. Forgotten runs are marked there, too, but for those whose version is
kept.

Answers of judges are kept below the root for every later run, and stay: with `--answers` they can go, where no run is
at work. Whoever asks the same afterwards pays again.

`--forget RUN` drops the record of a run first, so that what only it needs can go. What is named as KEY goes alone, and
is refused where a run needs it. Nothing is touched that a living process works on.
"""

from __future__ import annotations

import fcntl
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from components.artifacts import Artifact, Store, read_artifact
from components.errors import ArtifactError, EspalierError, ResourceError
from flows.history.records import Records, RunRecord
from flows.release.retention import Retention
from flows.stages.judge import ANSWERS
from flows.terminal.arguments import RootParser

KEY_LENGTH = 64
"""Characters of a stage key (sha256, hex)."""


_IN_ROUNDS = re.compile(r"evaluate\[\d+\]")


@dataclass(frozen=True)
class Waste:
    """Something that can go."""

    path: str
    what: str
    """Kind of artifact, or what else it is."""
    why: str
    bytes: int


class Cleaner:
    """What is needed below one root, and what is not.

    forget: runs that need nothing any more. give_up: whether what versions in MLflow's registry and deployments point
    to may go, for these runs and for what is named.
    """

    def __init__(self, root: Path, forget: Sequence[str] = (), *, give_up: bool = False):
        self.root = root.absolute()
        self.records = Records(self.root)
        self.store = Store(self.root / "artifacts")
        self.forgotten = [self.records.get(one) for one in forget]
        for run in self.forgotten:
            if self.records.alive(run):
                raise ResourceError(f"run {run.short} is running now ({run.process}); stop it first")
        gone = {run.id for run in self.forgotten}
        recorded = self.records.all()
        self.runs = [run for run in recorded if run.id not in gone]
        self.retention = Retention(self.root, recorded, self.forgotten, give_up)
        self.artifacts = {artifact.key: artifact for artifact in self._artifacts()}
        self.needed_by = self._needed_by()

    def waste(self, *, intermediate: bool = False, answers: bool = False) -> list[Waste]:
        """Everything that can go, the largest first. Raises ResourceError where answers are to go and a run is at
        work."""
        found = [*self._unneeded(), *self._debris()]
        found += [*self._intermediate()] if intermediate else []
        found += [*self._answers()] if answers else []
        return sorted(found, key=lambda one: (-one.bytes, one.path))

    def named(self, key: str) -> Waste:
        """The artifact of a key, or of the beginning of one. Raises ResourceError where there is none, or where a run
        needs it."""
        found = [artifact for artifact in self.artifacts.values() if artifact.key.startswith(key)]
        if len(found) != 1:
            raise ResourceError(f"{len(found)} artifacts in {self.store.root} have a key that begins with {key!r}")
        artifact = found[0]
        if artifact.key in self.needed_by:
            users = self.needed_by[artifact.key]
            listed = ", ".join(f"run {run.short} ({run.name}) for {label}" for run, label in users)
            raise ResourceError(
                f"{artifact.kind} {artifact.key[:12]} is in use by {listed}. To let "
                f"{'the run' if len(users) == 1 else 'these runs'} go too: "
                f"{' '.join(f'--forget {run.short}' for run, _ in users)}"
            )
        for holder in self.retention.holders:
            if artifact.key in holder.keys and not self.retention.give_up:
                raise ResourceError(
                    f"{artifact.kind} {artifact.key[:12]} is kept: {holder.why}. To delete it all the same: "
                    "--forget-champion"
                )
        return _waste(artifact, "named")

    def kept(self) -> list[Waste]:
        """What no run needs, but a version or a deployment points to."""
        unneeded = [artifact for artifact in self.artifacts.values() if artifact.key not in self.needed_by]
        held = self.retention.held if unneeded else {}
        return [_waste(artifact, held[artifact.key].why) for artifact in unneeded if artifact.key in held]

    def delete(self, waste: Iterable[Waste]) -> list[Waste]:
        """Removes it; returns what is gone. What a living process has locked meanwhile stays. Raises ResourceError
        where MLflow refuses, or a server has an export loaded; nothing is gone then."""
        waste, gone = list(waste), []
        if waste or self.forgotten:  # before any file goes: no version may point to nothing
            self.retention.forget(self.retention.dropped(_keys(waste)))
        for one in waste:
            path = Path(one.path)
            with _unused(self.store, path.name) as free:
                if not free:
                    continue
                if len(path.name) == KEY_LENGTH and path.parent == self.store.root:
                    aside = self.store.root / ".drafts" / f"{path.name}.gone"
                    aside.parent.mkdir(exist_ok=True)
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)  # at once: half an artifact must never be found
                    path = aside
                shutil.rmtree(path)
                gone.append(one)
        for run in self.forgotten:
            self.records.forget(run)
        return gone

    def _artifacts(self) -> Iterator[Artifact]:
        for path in self.store.root.glob("?" * KEY_LENGTH):
            try:
                yield read_artifact(path, verify=False)
            except ArtifactError:
                continue  # a run sets it aside when it meets it

    def _needed_by(self) -> dict[str, list[tuple[RunRecord, str]]]:
        """Key of each needed artifact, and the runs that need it, the latest first, each with a stage that does."""
        needed: dict[str, list[tuple[RunRecord, str]]] = {}

        def need(key: str, run: RunRecord, label: str) -> None:
            users = needed.setdefault(key, [])
            if users and users[-1][0] is run:
                return
            users.append((run, label))
            for below in self.artifacts[key].inputs.values() if key in self.artifacts else ():
                need(below, run, label)

        for run in self.runs:
            for stage in run.stages:
                need(stage.key, run, stage.label)
            for step, key in run.forked.items():
                need(key, run, f"its beginning at step {step}")
        return needed

    def _unneeded(self) -> Iterator[Waste]:
        unneeded = [artifact for artifact in self.artifacts.values() if artifact.key not in self.needed_by]
        held = self.retention.held if unneeded else {}
        living = min((run.started for run in self.runs if self.records.alive(run)), default=math.inf)
        for artifact in unneeded:
            new = artifact.path.stat().st_mtime >= living  # a living run may be about to record it
            if artifact.key not in held and not new:
                yield _waste(artifact, "no run needs it")

    def _debris(self) -> Iterator[Waste]:
        for path in self.store.root.glob("*.damaged-*"):
            yield Waste(str(path), "damaged artifact", "did not match its manifest; was set aside", _size(path))
        for path in (self.store.root / ".drafts").glob("*"):
            with _unused(self.store, path.name.partition(".")[0]) as free:
                if free:
                    why = "its process is dead; finished episodes and steps are kept elsewhere"
                    yield Waste(str(path), "draft", why, _size(path))
        for path in (self.store.root / ".scratch").glob("*"):
            if path.name in self.artifacts:
                yield Waste(str(path), "unfinished work", "the stage is done since", _size(path))
        for path in self.root.glob(".again-*"):
            yield Waste(str(path), "repeated stage", "its process is dead", _size(path))

    def _answers(self) -> Iterator[Waste]:
        folder = self.root / ANSWERS
        for run in self.runs:
            if self.records.alive(run):
                raise ResourceError(f"--answers: run {run.short} is running now ({run.process}); stop it first")
        if folder.is_dir():
            yield Waste(str(folder), "answers of judges", "whoever asks the same pays again", _size(folder))

    def _intermediate(self) -> Iterator[Waste]:
        kept = {key for run in self.runs for key in _worth_keeping(run, self.artifacts)}
        kept.update(key for holder in self.retention.holders for key in holder.keys)
        for run in self.runs:
            for stage in run.stages:
                artifact = self.artifacts.get(stage.key)
                if stage.kind == "checkpoint" and artifact is not None and artifact.key not in kept:
                    kept.add(artifact.key)  # once, though several runs share it
                    yield _waste(artifact, f"{stage.label} of run {run.short}: neither its latest nor its best")


def _worth_keeping(run: RunRecord, artifacts: dict[str, Artifact]) -> set[str]:
    """Keys of checkpoints that stay: all of a run that is not finished; of one that is, what it began with, the start
    of its rounds, its latest, its final one, and those of its rounds that are best by any metric of a round, lowest or
    highest."""
    checkpoints = [stage for stage in run.stages if stage.kind == "checkpoint"]
    begun = {run.forked[step] for step in [*sorted(run.forked, key=int)[-1:], "0"] if step in run.forked}
    keys = {*begun, *(stage.key for stage in checkpoints if stage.step <= 0)}
    keys |= {
        key
        for stage in run.stages
        if not _IN_ROUNDS.fullmatch(stage.label)  # these count by what they measured
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
        # What is collected and judged in round r is played by the policy of round r - 1.
        policy = stage.step if stage.kind in ("checkpoint", "evaluation") else stage.step - 1
        if artifact is None or policy not in by_step or "[reward" in stage.label:  # that is between the rounds
            continue
        for name, value in artifact.metrics.items():
            values.setdefault(f"{stage.kind}/{name}", []).append((value, by_step[policy]))
    for found in values.values():
        lowest, highest = min(value for value, _ in found), max(value for value, _ in found)
        if lowest < highest:
            keys |= {next(key for value, key in found if value == best) for best in (lowest, highest)}
    return keys


def _policies(inputs: dict[str, str], kind: str) -> list[str]:
    """Checkpoints that an evaluation or an export was made from."""
    return [key for name, key in inputs.items() if name == "policy" and kind in ("evaluation", "export")]


class _unused:
    """Whether nobody works on a key; it stays locked inside the block."""

    def __init__(self, store: Store, key: str):
        self._path = store.root / ".locks" / key

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


def _waste(artifact: Artifact, why: str) -> Waste:
    return Waste(str(artifact.path), artifact.kind, why, artifact.size)


def _keys(waste: Iterable[Waste]) -> set[str]:
    """Return the names of folders in the store."""
    return {Path(one.path).name for one in waste}


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 where what was asked for cannot be done."""
    parser = RootParser(
        prog="python -m flows.clean", description="Lists what can go below a root, and why. Deletes only with --delete."
    )
    parser.add_argument("keys", nargs="*", metavar="KEY", help="only these artifacts; refused where a run needs one")
    parser.add_argument(
        "--forget", action="append", default=[], metavar="RUN", help="a run that is not needed any more"
    )
    parser.add_argument(
        "--forget-champion",
        action="store_true",
        help="with --forget or KEY: also what registered and deployed versions point to; MLflow marks them as deleted",
    )
    parser.add_argument("--intermediate", action="store_true", help="also checkpoints that are neither latest nor best")
    parser.add_argument("--answers", action="store_true", help="also the kept answers of judges")
    parser.add_argument("--delete", action="store_true", help="delete it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_intermixed_args(argv)
    if options.forget_champion and not (options.forget or options.keys):
        parser.error("--forget-champion goes with --forget RUN or with KEY")
    try:
        if not (options.root / "artifacts").is_dir():
            raise ResourceError(f"there are no artifacts below {options.root}; give the folder of your runs: root=DIR")
        cleaner = Cleaner(options.root, options.forget, give_up=options.forget_champion)
        if options.keys:
            waste = [cleaner.named(key) for key in options.keys]
        else:
            waste = cleaner.waste(intermediate=options.intermediate, answers=options.answers)
        kept = [] if options.keys else cleaner.kept()
        dropped = cleaner.retention.dropped(_keys(waste)) if waste else []
        runs = [run for run, _ in cleaner.retention.unregistered(dropped)] if cleaner.forgotten else []
        gone = cleaner.delete(waste) if options.delete else []
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        listed = {"waste": [asdict(one) for one in (gone or waste)], "kept": [asdict(one) for one in kept]}
        print(json.dumps({"deleted": options.delete, **listed}))
        return 0
    for one in waste:
        print(f"{one.bytes / 1e6:10.1f} MB  {one.what}  {Path(one.path).name[:20]}  {one.why}")
    total = sum(one.bytes for one in waste) / 1e6
    for one in kept:
        print(f"{one.what} {Path(one.path).name[:20]} is kept: {one.why}")
    if kept:
        print("what is kept goes with --forget-champion, beside --forget RUN or the KEY")
    records = "".join(f", and the record of run {run.short}" for run in cleaner.forgotten)
    for run in cleaner.forgotten:
        print(f"run {run.short}: what it made and others still use will no longer say which run made it")
        if run in runs:
            print(f"run {run.short} is marked as deleted in MLflow: mlflow runs restore --run-id {run.id}")
    for holder in dropped:
        if holder.version is not None:
            print(f"{holder.title} is deleted in MLflow's registry")
    if options.delete:
        busy = f"; {len(waste) - len(gone)} are in use by a living process and stay" if len(gone) < len(waste) else ""
        print(f"deleted {len(gone)} of {len(waste)}, {sum(one.bytes for one in gone) / 1e6:.1f} MB{records}{busy}")
    else:
        print(f"{len(waste)} can go, {total:.1f} MB{records}; nothing is deleted without --delete")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
