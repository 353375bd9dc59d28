"""Figures of policies that play the same scenarios: measures, paired differences to the first policy, and the classes
of their unsuccessful episodes: failures by boundary and kind, and wrong results by the way in which they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.evaluation.metrics import (
    mean_measure,
    paired_difference,
    paired_rewards,
    pass_at_k,
    summarise,
)
from components.trajectories.schema import Score, Trajectory
from components.trajectories.stored import ScoredEpisodes, episodes_of
from components.trajectories.truncation import CALLS, CONTEXT, TURNS

UNREADABLE = "no readable action"
"""No message of the episode could be parsed into an action."""
TRUNCATED = {CONTEXT: "out of context", TURNS: "out of turns", CALLS: "out of calls"}
"""A limit ended the episode."""
CUT_OFF = "message cut off"
"""The last message reached the token limit."""
WRONG = "wrong result"
"""The episode ended by itself, without success."""


@dataclass(frozen=True)
class ErrorClass:
    """Unsuccessful episodes of one kind."""

    name: str
    """One of the names above, or `BOUNDARY: KIND` of a failure."""
    places: Sequence[int]
    """Positions of the episodes of the class, in their order."""


@dataclass(frozen=True)
class PlayedEpisodes:
    """Episodes of one evaluation."""

    trajectories: Sequence[Trajectory]
    """Episodes with their rewards."""
    scores: Mapping[str, Score]
    """Scores by episode id."""
    seconds: Mapping[str, float]
    """Wall-clock time by episode id, in seconds."""


@dataclass(frozen=True)
class PolicyResult:
    """Figures of one policy."""

    name: str
    """Name as given: `base`, `RUN@STEP`, `random`, `solver`, `PROVIDER/MODEL`."""
    description: str
    key: str
    """Key of its evaluation artifact."""
    summary: Mapping[str, Any]
    """Result of `components.evaluation.metrics.summarise`."""
    passes: Mapping[str, Any]
    """Result of `components.evaluation.metrics.pass_at_k`."""
    tokens: Mapping[str, Any]
    """Sampled tokens per episode: mean, low, high, n; mean None without a model, or if unknown."""
    seconds: Mapping[str, Any]
    """Wall-clock seconds per episode, with the concurrency of the evaluation; mean None for the solver."""
    cost: float | None
    """Cost per episode, of the provider or of the machine; None if unknown."""
    errors: Sequence[ErrorClass]
    episodes: Sequence[Trajectory]
    scores: Mapping[str, Score]


@dataclass(frozen=True)
class PoliciesComparison:
    """Policies and their differences, as the page shows them."""

    experiment: str
    split: str
    samples: int
    """Episodes per scenario."""
    temperature: float
    policies: Sequence[PolicyResult]
    success: Mapping[str, Mapping[str, Any] | None]
    """Paired difference in success to the first policy, by the name of each other policy; None without a scenario that
    both finished."""
    reward: Mapping[str, Mapping[str, Any] | None]
    """Paired difference in reward, likewise."""
    created: str = ""
    overrides: Sequence[str] = ()

    @property
    def baseline(self) -> str:
        """Name of the first policy, with which the others are compared."""
        return self.policies[0].name


def measure_policy(
    name: str,
    description: str,
    key: str,
    played: PlayedEpisodes,
    *,
    cost: float | None,
    samples: int,
) -> PolicyResult:
    """Return the figures of a policy. samples: the k of pass@k; a policy with one episode per scenario, the solver,
    would repeat it, so it counts k times."""
    import numpy as np

    episodes = episodes_of(played.trajectories)
    columns = episodes.columns
    repeats = samples if samples > 1 and len(columns.group_names) == len(columns) else 1
    tokens_N = columns.metric_N("sampled_tokens")
    seconds_N = np.array([played.seconds.get(name, np.nan) for name in columns.names], float)
    return PolicyResult(
        name=name,
        description=description,
        key=key,
        summary=summarise(columns),
        passes=pass_at_k(columns.take(np.arange(len(columns)).repeat(repeats)), samples),
        tokens=mean_measure(columns, np.where(tokens_N == 0, np.nan, tokens_N)),
        seconds=mean_measure(columns, seconds_N),
        cost=cost,
        errors=error_classes(episodes),
        episodes=played.trajectories,
        scores=played.scores,
    )


def differences(
    policies: Sequence[PolicyResult],
) -> tuple[dict[str, Mapping[str, Any] | None], dict[str, Mapping[str, Any] | None]]:
    """Return the paired differences in success and in reward of each policy to the first one, by name."""
    baseline, *others = policies

    def paired(compare: Any, other: PolicyResult) -> Mapping[str, Any] | None:
        try:
            return dict(compare(baseline.episodes, other.episodes))
        except ValueError:  # no scenario that both finished
            return None

    return (
        {other.name: paired(paired_difference, other) for other in others},
        {other.name: paired(paired_rewards, other) for other in others},
    )


def error_classes(episodes: ScoredEpisodes) -> list[ErrorClass]:
    """Return the classes of the unsuccessful episodes, the largest first."""
    columns, failures = episodes.columns, episodes.failures()
    turns_N, invalid_N = columns.metric_N("turns"), columns.metric_N("parse_errors")
    limits = [(columns.metric_N(metric), name) for metric, name in TRUNCATED.items()]
    unsolved = (~columns.success_N).nonzero()[0].tolist()
    ids, endings = columns.names, episodes.finish_reasons() if unsolved else []
    classes: dict[str, list[int]] = {}
    for place in unsolved:
        turns, failure = turns_N[place], failures.get(ids[place])
        if failure is not None:
            name = f"{failure.boundary}: {failure.kind}"
        elif turns and invalid_N[place] == turns:
            name = UNREADABLE
        else:
            limit = next((name for metric_N, name in limits if metric_N[place] > 0), None)
            name = limit or (CUT_OFF if endings[place] == "length" else WRONG)
        classes.setdefault(name, []).append(place)
    return [ErrorClass(name, classes[name]) for name in sorted(classes, key=lambda name: (-len(classes[name]), name))]
