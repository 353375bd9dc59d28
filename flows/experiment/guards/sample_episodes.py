"""Example episodes for a guard's message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from components.artifacts import Artifact
from flows.history.records import SampleEpisode
from flows.terminal.console import shorten

MOST = 3
"""Maximum number of episodes in one notice."""
LONGEST = 400
"""Maximum number of characters in one excerpt."""


def longest(trajectories: Artifact, scores: Artifact, label: str, *, shortest: bool = False) -> list[SampleEpisode]:
    """Return the episodes with the most sampled tokens, or with the fewest if `shortest`."""
    sign = 1 if shortest else -1
    return _first(
        trajectories,
        scores,
        label,
        key=lambda episode: sign * episode.metrics.get("sampled_tokens", 0.0),
        why=lambda episode: f"{episode.metrics.get('sampled_tokens', 0.0):.0f} sampled tokens",
    )


def most_repeated(trajectories: Artifact, scores: Artifact, label: str) -> list[SampleEpisode]:
    """Return the episodes with the highest share of repeated n-grams."""
    from components.rewards.rules.outcome import repetition
    from components.trajectories.policy_text import NGRAM

    return _first(
        trajectories,
        scores,
        label,
        key=lambda episode: -repetition(episode, NGRAM),
        why=lambda episode: f"{repetition(episode, NGRAM):.0%} of its {NGRAM}-grams repeat",
    )


def alike(trajectories: Artifact, scores: Artifact, label: str) -> list[SampleEpisode]:
    """Return episodes with the most common text, of different scenarios if possible."""
    from components.trajectories.policy_text import policy_messages

    episodes = [episode for episode in _scored(trajectories, scores) if episode.failure is None]
    if not episodes:
        return []
    failures = [episode for episode in episodes if not episode.success]
    counts = Counter(map(policy_messages, failures)) or Counter(map(policy_messages, episodes))
    answer, count = counts.most_common(1)[0]
    identical = [episode for episode in failures if policy_messages(episode) == answer] or episodes
    first_of_groups = list({episode.group: episode for episode in reversed(identical)}.values())[::-1]
    chosen = (first_of_groups + [episode for episode in identical if episode not in first_of_groups])[:MOST]
    why = f"{count} of {len(episodes)} episodes say this without success"
    return [_shown(label, episode, why) for episode in chosen]


def most_disputed(trajectories: Artifact, scores: Artifact, label: str, component: str) -> list[SampleEpisode]:
    """Return the episodes with the highest disagreement of an ensemble. component: score component with its spread."""
    from components.trajectories.store import read_scores

    if not _exist(trajectories, scores):
        return []
    spread = {
        score.trajectory_id: score.components[component]
        for score in read_scores(_scores(scores))
        if component in score.components
    }
    return _first(
        trajectories,
        scores,
        label,
        key=lambda episode: -spread.get(episode.id, 0.0),
        why=lambda episode: f"spread {spread.get(episode.id, 0.0):.3g}",
    )


def high_reward_failures(trajectories: Artifact, scores: Artifact, label: str) -> list[SampleEpisode]:
    """Return the episodes without success that have the highest reward."""
    return _first(
        trajectories,
        scores,
        label,
        key=lambda episode: (episode.success, -(episode.reward if episode.reward is not None else float("-inf"))),
        why=lambda episode: "solved" if episode.success else "not solved",
    )


def _first(
    trajectories: Artifact,
    scores: Artifact,
    label: str,
    key: Callable[[Any], Any],
    why: Callable[[Any], str],
) -> list[SampleEpisode]:
    """Return the first finished episodes in the order of `key`, then by descending reward; an empty list if the files
    are not on this machine."""
    if not _exist(trajectories, scores):
        return []
    finished = [episode for episode in _scored(trajectories, scores) if episode.failure is None]
    finished.sort(key=lambda episode: (key(episode), -(episode.reward or 0.0), episode.id))
    return [_shown(label, episode, why(episode)) for episode in finished[:MOST]]


def _shown(label: str, episode: Any, why: str) -> SampleEpisode:
    from components.trajectories.policy_text import text

    reward = "not scored" if episode.reward is None else f"reward {episode.reward:.3g}"
    return SampleEpisode(label, episode.id, f"{why}, {reward}", shorten(text(episode), LONGEST))


def _scored(trajectories: Artifact, scores: Artifact) -> Sequence[Any]:
    from components.trajectories.store import load_scored

    return (
        load_scored(trajectories.path / "trajectories.parquet", _scores(scores), None)
        if _exist(trajectories, scores)
        else []
    )


def _scores(artifact: Artifact) -> Path:
    return artifact.path / "scores.parquet"


def _exist(trajectories: Artifact, scores: Artifact) -> bool:
    """Return True if the files exist here; False in a plan with pending artifacts, or for artifacts elsewhere."""
    return (trajectories.path / "trajectories.parquet").is_file() and _scores(scores).is_file()
