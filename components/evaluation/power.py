"""Power of a planned experiment: share of groups that carry a learning signal, and gain that an evaluation can detect.

A group of G episodes of a scenario with success probability p carries a signal for group-relative methods if its
outcomes differ: 1 - p^G - (1 - p)^G. The share over scenarios is the mean, so it depends on how p varies:

- From c successes in n >= G episodes of a scenario, the estimate is unbiased: 1 - (C(c, G) + C(n-c, G)) / C(n, G).
- From fewer episodes, p follows a beta distribution in each stratum (type and difficulty), fitted by moments; E[p^G] is
  a product (beta-binomial distribution). The intra-scenario correlation is the ANOVA estimate (Ridout et al. 1999,
  Biometrics 55:137).
- From one episode of each scenario, p is equal within a stratum, which overestimates the share.

The detectable gain is that of a paired test (McNemar) on held-out scenarios at 80 % power (Connor 1987, Biometrics
43:207).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from components.evaluation.metrics import all_of_k
from components.evaluation.sequential import scenarios_to_decide
from components.evaluation.verdict import paired_scenarios, power

STEP = 1e-3
"""Resolution of the detectable gain."""
MOST_SEEDS = 100


@dataclass(frozen=True)
class Outcomes:
    """Successes of the episodes of a scenario."""

    successes: int
    episodes: int
    stratum: str = ""
    """Type and difficulty."""


def group_signal(p: float, size: int) -> float:
    """Return the probability that the outcomes of a group differ."""
    return 1 - p**size - (1 - p) ** size


def signal_share(scenarios: Sequence[Outcomes], size: int) -> float:
    """Return the expected share of groups of this size that carry a signal. scenarios: at least one."""
    strata: dict[str, list[Outcomes]] = {}
    for scenario in scenarios:
        strata.setdefault(scenario.stratum, []).append(scenario)
    shares = [(len(members), _stratum_share(members, size)) for members in strata.values()]
    return sum(count * share for count, share in shares) / len(scenarios)


def _stratum_share(scenarios: Sequence[Outcomes], size: int) -> float:
    if all(scenario.episodes >= size for scenario in scenarios):
        return fmean(
            1
            - all_of_k(scenario.episodes, scenario.successes, size)
            - all_of_k(scenario.episodes, scenario.episodes - scenario.successes, size)
            for scenario in scenarios
        )
    mean = sum(scenario.successes for scenario in scenarios) / sum(scenario.episodes for scenario in scenarios)
    correlation = intra_scenario_correlation(scenarios)
    return 1 - _moment(mean, correlation, size) - _moment(1 - mean, correlation, size)


def _moment(mean: float, correlation: float, size: int) -> float:
    """Return E[p^size] of a beta distribution with this mean and intra-class correlation 1 / (a + b + 1)."""
    if correlation <= 0:
        return mean**size
    if correlation >= 1:
        return mean
    total = 1 / correlation - 1
    return math.prod((mean * total + k) / (total + k) for k in range(size))


def intra_scenario_correlation(scenarios: Sequence[Outcomes]) -> float:
    """Return the ANOVA estimate of the correlation of two episodes of the same scenario, from 0 to 1; 0 if it cannot be
    estimated."""
    count, total = len(scenarios), sum(scenario.episodes for scenario in scenarios)
    if count < 2 or total == count:
        return 0.0
    mean = sum(scenario.successes for scenario in scenarios) / total
    rates = [scenario.successes / scenario.episodes for scenario in scenarios]
    sizes = [scenario.episodes for scenario in scenarios]
    between = sum(n * (rate - mean) ** 2 for n, rate in zip(sizes, rates, strict=True)) / (count - 1)
    within = sum(n * rate * (1 - rate) for n, rate in zip(sizes, rates, strict=True)) / (total - count)
    typical = (total - sum(n * n for n in sizes) / total) / (count - 1)
    spread = between + (typical - 1) * within
    return min(1.0, max(0.0, (between - within) / spread)) if spread else 0.0


def worst_discordance(base: float, gain: float) -> float:
    """Return the largest possible share of scenarios that exactly one of two policies solves."""
    after = min(1.0, base + gain)
    return min(base + after, 2 - base - after)


def scenarios_needed(gain: float, discordance: float, alpha: float | None = None) -> int:
    """Return the number of scenarios with which a paired evaluation detects a gain at 80 % power. alpha: error rate of
    an evaluation that stops when it is decided; None for a fixed number of scenarios."""
    return paired_scenarios(gain, discordance) if alpha is None else scenarios_to_decide(gain, discordance, alpha)


def detectable_gain(
    scenarios: int, base: float | None, discordance: float | None, alpha: float | None = None
) -> float | None:
    """Return the smallest gain that a paired evaluation on these scenarios detects at 80 % power; None if not even the
    largest possible one. discordance: None for the worst case. alpha: as in `scenarios_needed`."""
    room = 1.0 if base is None else 1 - base
    for number in range(1, math.floor(room / STEP) + 1):
        gain = number * STEP
        if scenarios_needed(gain, _share(base, gain, discordance), alpha) <= scenarios:
            return round(gain, 3)
    return None


def scenarios_for_gain(gain: float, base: float | None, discordance: float | None, alpha: float | None = None) -> int:
    """Return the number of held-out scenarios with which one pair of policies shows a gain at 80 % power. alpha: as in
    `scenarios_needed`."""
    return scenarios_needed(gain, _share(base, gain, discordance), alpha)


def _share(base: float | None, gain: float, discordance: float | None) -> float:
    if discordance is not None:
        return discordance
    return 1.0 if base is None else worst_discordance(base, gain)


def seeds_for_gain(gain: float, deviation: float) -> int | None:
    """Return the number of seeds with which a t test over seeds detects a gain at 80 % power; None if more than
    MOST_SEEDS. deviation: standard deviation of the gain over seeds."""
    if deviation == 0:
        return 2
    for seeds in range(2, MOST_SEEDS + 1):
        if power(gain, deviation / math.sqrt(seeds), seeds - 1) >= 0.8:
            return seeds
    return None


def sampling_deviation(gain: float, scenarios: int, base: float | None, discordance: float | None) -> float:
    """Return the standard deviation of a measured gain that the number of scenarios alone causes."""
    return math.sqrt(max(_share(base, gain, discordance) - gain**2, 0.0) / scenarios)


def group_size_for(scenarios: Sequence[Outcomes], share: float, sizes: Sequence[int]) -> int | None:
    """Return the smallest of these group sizes with at least this share of groups with signal; None if none has."""
    return next((size for size in sizes if signal_share(scenarios, size) >= share), None)
