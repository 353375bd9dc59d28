"""Episodes of a past run for annotation: those of one stage, with the judge's scores."""

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
from components.trajectories.feedback import FOLDER, Line, Withdrawal, content_digest
from components.trajectories.feedback_episodes import mismatch
from components.trajectories.groups import by_scenario
from components.trajectories.schema import Score, Trajectory
from flows.history.records import RunRecord, StageRecord
from flows.history.trust import readable_store
from flows.stages import EPISODE_KINDS

_ROUND = re.compile(r"collect\[\d+\]")


@dataclass
class StageEpisodes:
    """Episodes of one stage of a run."""

    run: RunRecord
    label: str
    artifact: Artifact
    file: Path
    """File of the answers about these episodes."""
    by_id: dict[str, Trajectory]
    """Episodes by id, in display order, without token ids and log-probabilities."""
    scores: dict[str, Score]
    """Scores of the run's judge by episode id; empty if it judged none."""
    contents: dict[str, str] = field(default_factory=dict)
    """Digest of the visible content of each episode, by id."""

    def __post_init__(self) -> None:
        self.contents = {name: content_digest(episode) for name, episode in self.by_id.items()}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of episodes to compare: each finished episode with the next one of its scenario, which is enough to
        order all. The left side is drawn at random, reproducibly."""
        pairs = []
        for group in by_scenario(self.by_id.values()).values():
            for a, b in pairwise(episode.id for episode in group if episode.failure is None):
                sides = [a, b]
                random.Random(f"{self.artifact.digest} {a} {b}").shuffle(sides)
                pairs.append((sides[0], sides[1]))
        return pairs

    def problem(self, line: Line) -> str | None:
        """Return the reason why an answer is invalid for these episodes, or None if it is valid."""
        if line.artifact != self.artifact.digest:
            return f"artifact {line.artifact[:12]} is not {self.label} of run {self.run.short}"
        return None if isinstance(line, Withdrawal) else mismatch(line, self.by_id, self.label)


def stages(run: RunRecord) -> list[StageRecord]:
    """Return the stages of a run that have episodes."""
    return [stage for stage in run.stages if stage.kind in EPISODE_KINDS]


def default_stage(run: RunRecord) -> StageRecord:
    """Return the last round's collection, which can be used for training, or for a run without rounds the last stage
    with episodes. Raises ResourceError if there is none."""
    with_episodes = stages(run)
    if not with_episodes:
        raise ResourceError(
            f"run {run.short} ({run.name}) has no episodes yet: no collect or evaluate stage has finished"
        )
    rounds = [stage for stage in with_episodes if _ROUND.fullmatch(stage.label)]
    return (rounds or with_episodes)[-1]


def stage_named(run: RunRecord, label: str | None) -> StageRecord:
    """Return the stage with this label, or the default stage. Raises ResourceError if it has no episodes."""
    if label is None:
        return default_stage(run)
    by_label = {stage.label: stage for stage in stages(run)}
    if label in by_label:
        return by_label[label]
    if not by_label:
        return default_stage(run)
    close = nearest(label, by_label)
    suggestion = f" (did you mean {close}?)" if close else ""
    raise ResourceError(
        f"--stage {label}: run {run.short} has no such episodes{suggestion}; it has {', '.join(by_label)}"
    )


def load(
    root: Path, run: RunRecord, stage: StageRecord, sample: int | None = None, seed: int = 0, *, trust: bool = False
) -> StageEpisodes:
    """Load the episodes of a stage. sample: number of episodes to draw, in whole groups except the last; None: all.
    trust: read the store that the run names.

    Raises ResourceError if the artifact is no longer in the store or has no episodes.
    """
    from components.trajectories.store import read_scores, read_trajectories

    store = Store(root / "artifacts", readable_store(run, root, trust))
    artifact = store.find(stage.key)
    if artifact is None:
        raise ResourceError(f"the episodes of {stage.label} of run {run.short} are no longer in {store}: run it again")
    episodes = []
    for episode in read_trajectories(artifact.path / "trajectories.parquet"):
        for history in episode.histories:
            history.token_ids, history.logprobs = [], []  # not shown; frees memory
        episodes.append(episode)
    if not episodes:
        raise ResourceError(f"{stage.label} of run {run.short} has no episodes")
    judged = artifact if artifact.kind == "evaluation" else _scores_artifact(store, run, stage)
    scores = {score.trajectory_id: score for score in read_scores(judged.path / "scores.parquet")} if judged else {}
    for episode in episodes:
        episode.reward = scores[episode.id].reward if episode.id in scores else None
    by_id = {episode.id: episode for episode in sample_groups(episodes, sample, seed)}
    return StageEpisodes(run, stage.label, artifact, root / FOLDER / f"{artifact.digest}.jsonl", by_id, scores)


def sample_groups(episodes: Sequence[Trajectory], sample: int | None, seed: int) -> list[Trajectory]:
    """Return all episodes, or the first `sample` of them after shuffling the groups by scenario."""
    if sample is None:
        return list(episodes)
    groups = list(by_scenario(episodes).values())
    random.Random(seed).shuffle(groups)
    return [episode for group in groups for episode in group][:sample]


def _scores_artifact(store: Store, run: RunRecord, stage: StageRecord) -> Artifact | None:
    """Return the artifact with the judge's scores of a stage's episodes, if there is one."""
    for other in run.stages:
        if other.kind == "scores" and other.request["inputs"].get("trajectories") == stage.key:
            return store.find(other.key)
    return None
