"""Difference of two evaluations in a metric, paired over held-out scenarios, and the seeds that would decide it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, stdev
from typing import Any

from components.errors import ResourceError
from components.evaluation.metrics import mean_by_scenario, paired_difference, paired_means, paired_rewards
from components.evaluation.verdict import CONFIDENCE, POWER, Outcome, outcome, paired_scenarios
from components.trajectories.schema import Trajectory

Pairing = Callable[[Sequence[Trajectory], Sequence[Trajectory]], Mapping[str, Any]]


def _turns(trajectory: Trajectory) -> float | None:
    return trajectory.metrics.get("turns")


def _reward(trajectory: Trajectory) -> float | None:
    return trajectory.reward


METRICS: dict[str, Pairing] = {
    "success": paired_difference,
    "reward": paired_rewards,
    "turns": lambda before, after: paired_means(before, after, _turns),
}
"""Paired differences by metric."""


@dataclass(frozen=True)
class PairedEffect:
    """Difference in the mean of a metric with its 95 % interval over scenarios."""

    difference: float
    low: float | None
    high: float | None
    before: float
    after: float
    scenarios: int

    @property
    def outcome(self) -> Outcome:
        """Verdict of the interval."""
        return outcome(self.low, self.high)

    @property
    def interval(self) -> list[float] | None:
        """Ends of the interval as JSON data."""
        return None if self.low is None or self.high is None else [self.low, self.high]

    def text(self) -> str:
        """Return the effect as text: `-0.412 [-0.463, -0.357]`."""
        interval = "" if self.low is None or self.high is None else f" [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.difference:+.3f}{interval}"


def paired_effect(metric: str, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> PairedEffect:
    """Return the effect on the scenarios that both evaluations finished, with the same content. Raises ResourceError if
    there is none."""
    first, second = same_scenarios(before, after)
    try:
        paired = METRICS[metric](first, second)
    except ValueError:
        raise ResourceError(
            f"the two evaluations share no scenario with a {metric}: they need the same environment, "
            "evaluate.split and evaluate.scenarios"
        ) from None
    return PairedEffect(
        paired["difference"], paired["low"], paired["high"], paired["before"], paired["after"], paired["n"]
    )


def same_scenarios(
    before: Sequence[Trajectory], after: Sequence[Trajectory]
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return the episodes of both sides on scenarios with the same id and content."""
    first, second = ({episode.group: episode.scenario for episode in side} for side in (before, after))
    same = {name for name in first.keys() & second.keys() if first[name] == second[name]}
    return [episode for episode in before if episode.group in same], [
        episode for episode in after if episode.group in same
    ]


def seeds_to_decide(
    metric: str, effect: PairedEffect, before: Sequence[Trajectory], after: Sequence[Trajectory]
) -> int | None:
    """Return the number of seeds of each run with which a difference of this size is decided at 80 % power, on the same
    scenarios; None without a difference.

    The variance between seeds is unknown with one seed of each. The number assumes that a further seed is as
    informative as the same number of further scenarios, so it is a lower bound.
    """
    if not effect.difference:
        return None
    first, second = same_scenarios(before, after)
    if metric == "success":
        paired = paired_difference(first, second)
        changed = (len(paired["improved"]) + len(paired["regressed"])) / paired["n"]
        needed = paired_scenarios(effect.difference, changed)
    else:
        measure = _turns if metric == "turns" else _reward
        means = [mean_by_scenario(side, measure) for side in (first, second)]
        differences = [means[1][name] - means[0][name] for name in means[0].keys() & means[1].keys()]
        if len(differences) < 2:
            return None
        z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) + NormalDist().inv_cdf(POWER)
        needed = math.ceil((z * stdev(differences) / effect.difference) ** 2)
    return max(2, math.ceil(needed / effect.scenarios))
