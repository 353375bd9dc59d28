"""The episodes that show best what a guard has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from components.artifacts import Artifact
from flows.history.records import Shown

MOST = 3
"""Episodes of one notice."""
LONGEST = 400
"""Characters of one excerpt."""


def longest(trajectories: Artifact, scores: Artifact, label: str, *, shortest: bool = False) -> list[Shown]:
    """Episodes with the most sampled tokens, or the fewest."""
    sign = 1 if shortest else -1
    return _first(
        trajectories,
        scores,
        label,
        key=lambda one: sign * one.metrics.get("sampled_tokens", 0.0),
        why=lambda one: f"{one.metrics.get('sampled_tokens', 0.0):.0f} sampled tokens",
    )


def most_repeated(trajectories: Artifact, scores: Artifact, label: str) -> list[Shown]:
    """Episodes that repeat the most."""
    from components.rewards.rules.outcome import repetition
    from components.trajectories.policy_text import NGRAM

    return _first(
        trajectories,
        scores,
        label,
        key=lambda one: -repetition(one, NGRAM),
        why=lambda one: f"{repetition(one, NGRAM):.0%} of its {NGRAM}-grams repeat",
    )


def alike(trajectories: Artifact, scores: Artifact, label: str) -> list[Shown]:
    """Episodes that say what the most say, of different scenarios as far as there are."""
    from components.trajectories.policy_text import said

    episodes = [one for one in _scored(trajectories, scores) if one.failure is None]
    if not episodes:
        return []
    counts = Counter(said(one) for one in episodes if not one.success) or Counter(map(said, episodes))
    answer, count = counts.most_common(1)[0]
    saying = [one for one in episodes if said(one) == answer and not one.success] or episodes
    groups = list({one.group: one for one in reversed(saying)}.values())[::-1]
    chosen = (groups + [one for one in saying if one not in groups])[:MOST]
    why = f"{count} of {len(episodes)} episodes say this without success"
    return [_shown(label, one, why) for one in chosen]


def most_disputed(trajectories: Artifact, scores: Artifact, label: str, component: str) -> list[Shown]:
    """Episodes about which an ensemble disagrees the most. component: that says how much."""
    from components.trajectories.store import read_scores

    if not _there(trajectories, scores):
        return []
    spread = {
        one.trajectory_id: one.components[component]
        for one in read_scores(_scores(scores))
        if component in one.components
    }
    return _first(
        trajectories,
        scores,
        label,
        key=lambda one: -spread.get(one.id, 0.0),
        why=lambda one: f"spread {spread.get(one.id, 0.0):.3g}",
    )


def liked_in_vain(trajectories: Artifact, scores: Artifact, label: str) -> list[Shown]:
    """Episodes without success that have the highest reward."""
    return _first(
        trajectories,
        scores,
        label,
        key=lambda one: (one.success, -(one.reward if one.reward is not None else float("-inf"))),
        why=lambda one: "solved" if one.success else "not solved",
    )


def _first(
    trajectories: Artifact,
    scores: Artifact,
    label: str,
    key: Callable[[Any], Any],
    why: Callable[[Any], str],
) -> list[Shown]:
    """The first ones in this order; of equal ones those with the higher reward. None where the files are not here."""
    if not _there(trajectories, scores):
        return []
    finished = [one for one in _scored(trajectories, scores) if one.failure is None]
    finished.sort(key=lambda one: (key(one), -(one.reward or 0.0), one.id))
    return [_shown(label, one, why(one)) for one in finished[:MOST]]


def _shown(label: str, one: Any, why: str) -> Shown:
    from components.trajectories.policy_text import text

    reward = "not scored" if one.reward is None else f"reward {one.reward:.3g}"
    said = text(one)
    excerpt = said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"
    return Shown(label, one.id, f"{why}, {reward}", excerpt)


def _scored(trajectories: Artifact, scores: Artifact) -> Sequence[Any]:
    from components.trajectories.store import load_scored

    return (
        load_scored(trajectories.path / "trajectories.parquet", _scores(scores), None)
        if _there(trajectories, scores)
        else []
    )


def _scores(artifact: Artifact) -> Path:
    return artifact.path / "scores.parquet"


def _there(trajectories: Artifact, scores: Artifact) -> bool:
    """False in a plan whose artifacts are not made yet, or not on this machine."""
    return (trajectories.path / "trajectories.parquet").is_file() and _scores(scores).is_file()
