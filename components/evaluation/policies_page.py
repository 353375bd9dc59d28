"""Comparison of policies on the same scenarios, as data and as one self-contained HTML page.

`measure_policy` computes the figures of one policy from its episodes; `differences` computes the paired
differences to the first one, the baseline; `render` renders the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.evaluation.error_classes import ErrorClass, error_classes
from components.evaluation.examples import view
from components.evaluation.metrics import (
    mean_measure,
    paired_difference,
    paired_rewards,
    pass_at_k,
    summarise,
)
from components.evaluation.page import page
from components.evaluation.plots import COLOURS
from components.redaction import mask_text
from components.trajectories.schema import Score, Trajectory
from components.trajectories.stored import episodes_of

EXAMPLES = 2
"""Number of example episodes of each error class."""
BREAKDOWNS = {"by_type": "Type", "by_difficulty": "Difficulty"}
"""Breakdowns of a summary by scenario, with their titles."""


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
    """Content of the page."""

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


def render(comparison: PoliciesComparison) -> str:
    """Return the page as HTML text."""
    policies = comparison.policies
    named = {f"{name} against {comparison.baseline}": paired for name, paired in comparison.success.items()}
    return page(
        "policies.html.j2",
        it=comparison,
        evaluations=[{"label": policy.name, "summary": policy.summary} for policy in policies],
        success={name: paired for name, paired in named.items() if paired is not None},
        reward={name: paired for name, paired in comparison.reward.items() if paired is not None},
        breakdowns=[
            {
                "title": title,
                "kinds": list(dict.fromkeys(kind for policy in policies for kind in policy.summary[name])),
                "rows": [(policy.name, policy.summary[name]) for policy in policies],
            }
            for name, title in BREAKDOWNS.items()
        ],
        errors=[
            {
                "policy": policy,
                "classes": [(error.name, len(error.places), _examples(policy, error)) for error in policy.errors],
            }
            for policy in policies
        ],
        overrides=[mask_text(override) for override in comparison.overrides],
        colours=COLOURS,
    )


def _examples(policy: PolicyResult, error: ErrorClass) -> list[dict[str, Any]]:
    examples = episodes_of(policy.episodes).rows(error.places[:EXAMPLES])
    return [view(episode, policy.scores.get(episode.id)) for episode in examples]
