"""The episodes of a past run that people read: those of one of its stages, with what the judge said of them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from components.artifacts import Artifact, Store
from components.errors import ResourceError
from components.specs import nearest
from components.trajectories.feedback import FOLDER, Choice, Correction, Line, Withdrawal, content_digest, corrects
from components.trajectories.groups import by_scenario
from components.trajectories.schema import Score, Trajectory
from flows.history.records import RunRecord, StageRecord

KINDS = ("trajectories", "evaluation")
"""Kinds of artifacts with episodes."""
_ROUND = re.compile(r"collect\[\d+\]")


@dataclass
class Episodes:
    """Of one stage of a run."""

    run: RunRecord
    label: str
    artifact: Artifact
    file: Path
    """Where answers about them are kept."""
    by_id: dict[str, Trajectory]
    """In the order in which they are shown; without their tokens."""
    scores: dict[str, Score]
    """By the run's judge; empty where it judged none."""
    contents: dict[str, str] = field(default_factory=dict)
    """Digest of what a person reads of each."""

    def __post_init__(self) -> None:
        self.contents = {name: content_digest(one) for name, one in self.by_id.items()}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Episodes to compare: each finished one with the next of its scenario, which is enough to order all. Which
        one stands on the left is drawn."""
        found = []
        for group in by_scenario(self.by_id.values()).values():
            for one, other in pairwise(item.id for item in group if item.failure is None):
                sides = [one, other]
                random.Random(f"{self.artifact.digest} {one} {other}").shuffle(sides)
                found.append((sides[0], sides[1]))
        return found

    def problem(self, line: Line) -> str | None:
        """Why an answer cannot be about these episodes; None where it can."""
        if line.artifact != self.artifact.digest:
            return f"artifact {line.artifact[:12]} is not {self.label} of run {self.run.short}"
        if isinstance(line, Withdrawal):
            return None
        named = [(line.trajectory, line.content)]
        if isinstance(line, Choice):
            named.append((line.other, line.other_content))
        for name, content in named:
            if name not in self.by_id:
                return f"there is no episode {name!r} in {self.label}{_meant(name, self.by_id)}"
            if content != self.contents[name]:
                return f"episode {name!r} of {self.label} has another content than the one that was read"
        one = self.by_id[line.trajectory]
        if isinstance(line, Choice) and one.group != self.by_id[line.other].group:
            return f"{line.trajectory!r} and {line.other!r} are of different scenarios, which are not compared"
        if isinstance(line, Correction) and not corrects(line, one):
            return f"message {line.message} of history {line.history} of {line.trajectory!r} is not the assistant's"
        return None


def stages(run: RunRecord) -> list[StageRecord]:
    """Those of a run that have episodes."""
    return [one for one in run.stages if one.kind in KINDS]


def default_stage(run: RunRecord) -> StageRecord:
    """The last round's collection, whose episodes can be trained on; of a run without rounds the last stage that has
    episodes. Raises ResourceError where there is none."""
    found = stages(run)
    if not found:
        raise ResourceError(
            f"run {run.short} ({run.name}) has no episodes yet: none of its stages has collected or evaluated"
        )
    rounds = [one for one in found if _ROUND.fullmatch(one.label)]
    return (rounds or found)[-1]


def stage_named(run: RunRecord, label: str | None) -> StageRecord:
    """Raises ResourceError where the run has no such stage with episodes."""
    if label is None:
        return default_stage(run)
    found = {one.label: one for one in stages(run)}
    if label in found:
        return found[label]
    if not found:
        return default_stage(run)
    meant = _meant(label, found)
    raise ResourceError(f"--stage {label}: run {run.short} has no such episodes{meant}; it has {', '.join(found)}")


def load(root: Path, run: RunRecord, stage: StageRecord, sample: int | None = None, seed: int = 0) -> Episodes:
    """The episodes of a stage; with `sample` so many of them, whole groups as far as they go, drawn by the seed.

    Raises ResourceError where the store no longer has them, or there is none.
    """
    from components.trajectories.store import read_scores, read_trajectories

    store = Store(root / "artifacts", run.spec.get("store"))
    artifact = store.find(stage.key)
    if artifact is None:
        raise ResourceError(f"the episodes of {stage.label} of run {run.short} are no longer in {store}: run it again")
    found = []
    for one in read_trajectories(artifact.path / "trajectories.parquet"):
        for history in one.histories:
            history.token_ids, history.logprobs = [], []  # nobody reads them
        found.append(one)
    if not found:
        raise ResourceError(f"{stage.label} of run {run.short} has no episodes")
    judged = artifact if artifact.kind == "evaluation" else _judged(store, run, stage)
    scores = {one.trajectory_id: one for one in read_scores(judged.path / "scores.parquet")} if judged else {}
    for one in found:
        one.reward = scores[one.id].reward if one.id in scores else None
    shown = {one.id: one for one in drawn(found, sample, seed)}
    return Episodes(run, stage.label, artifact, root / FOLDER / f"{artifact.digest}.jsonl", shown, scores)


def drawn(episodes: Sequence[Trajectory], sample: int | None, seed: int) -> list[Trajectory]:
    """All, or `sample` of them: groups in an order that is drawn, as far as they go."""
    if sample is None:
        return list(episodes)
    groups = list(by_scenario(episodes).values())
    random.Random(seed).shuffle(groups)
    return [one for group in groups for one in group][:sample]


def _judged(store: Store, run: RunRecord, stage: StageRecord) -> Artifact | None:
    """What the run's judge said of the episodes of a stage."""
    for one in run.stages:
        if one.kind == "scores" and one.request["inputs"].get("trajectories") == stage.key:
            return store.find(one.key)
    return None


def _meant(name: str, known: Sequence[str] | dict[str, Trajectory] | dict[str, StageRecord]) -> str:
    close = nearest(name, known)
    return f" (did you mean {close}?)" if close else ""
