"""Verdict on two settings, each evaluated with several seeds on the same held-out scenarios.

Seeds and scenarios are crossed random effects: every seed's policy plays every scenario, and the conclusion holds for
other seeds and other scenarios of the same kind. Of the differences d_ij of seed i on scenario j, n seeds and m
scenarios, the variance of the mean is estimated by

    (MS_seeds + MS_scenarios - MS_residual) / (n m)

with the mean squares of the two-way layout, and its degrees of freedom by Satterthwaite's approximation (1946,
Biometrics Bulletin 2:110). The interval is Student's t. This is the quasi-F test with participants and items of Clark
1973 (Journal of Verbal Learning and Verbal Behavior 12:335). If the sides have different seeds, only scenarios are
paired, and the variances over the seeds of both sides are added, as in Welch's test. The estimate is at least the
larger of the variance over seeds and that over scenarios, so subtracting the residual cannot make it too small.

The interval includes that within the seeds, which does not vanish if all observed outcomes are equal: Newcombe's paired
interval on the pooled outcomes. Its number of pairs is n m divided by the design effect (Kish 1965), the ratio of the
variance over scenarios to that of independent outcomes: n m if each seed's outcomes are independent, m if all seeds
agree on every scenario.

A bootstrap over seeds is not used: with three seeds its intervals are far too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

from components.evaluation.proportions import newcombe

CONFIDENCE = 0.95
POWER = 0.8
MOST_SEEDS = 1000
"""Largest number of additional seeds that a verdict recommends."""
CROSSED = "t interval with seeds and scenarios as crossed random effects (Clark 1973; Satterthwaite 1946)"
Outcome = Literal["better", "worse", "undecided"]


@dataclass(frozen=True)
class VarianceParts:
    """Estimated variances of a mean difference, in the form that predicts those of other numbers of seeds."""

    seeds: tuple[tuple[float, int], ...]
    """Part that further seeds reduce, with the present number of seeds: one entry for paired seeds, else one for each
    side."""
    scenarios: float
    """Part that only further scenarios reduce."""
    count: int
    """Number of scenarios."""

    def variance(self, more: int = 0) -> float:
        """Return the variance with `more` further seeds on each side."""
        return sum(part * n / (n + more) for part, n in self.seeds) + self.scenarios

    def freedom(self, more: int = 0) -> float:
        """Return the approximate degrees of freedom with `more` further seeds."""
        total = self.variance(more)
        parts = sum((part * n / (n + more)) ** 2 / (n + more - 1) for part, n in self.seeds)
        parts += self.scenarios**2 / (self.count - 1)
        return total**2 / parts if parts else math.inf


@dataclass(frozen=True)
class Effect:
    """Mean difference of two sides with its 95 % interval."""

    difference: float
    low: float
    high: float
    scenarios: int
    parts: VarianceParts

    @property
    def outcome(self) -> Outcome:
        """Verdict of the interval."""
        return outcome(self.low, self.high)


def outcome(low: float | None, high: float | None) -> Outcome:
    """Return the verdict of a difference with this interval; an interval that includes 0, or none, is undecided."""
    if low is None or high is None:
        return "undecided"
    return "better" if low > 0 else "worse" if high < 0 else "undecided"


def seeded_effect(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], *, paired: bool) -> Effect:
    """Return the effect of `after` against `before`: success by seed and scenario, in the same order of scenarios.

    paired: True if both have the same seeds in the same order. Raises ValueError for fewer than two seeds or scenarios.
    """
    import numpy as np

    if paired:
        tables = [np.asarray(after, float) - np.asarray(before, float)]
        difference_C = tables[0].mean(axis=0)
    else:
        tables = [np.asarray(side, float) for side in (before, after)]
        difference_C = tables[1].mean(axis=0) - tables[0].mean(axis=0)
    count = difference_C.size
    if count < 2 or any(len(table) < 2 for table in tables):
        raise ValueError("an effect over seeds and scenarios needs at least 2 of each")
    over_scenarios = float(difference_C.var(ddof=1)) / count
    over_seeds = [float(table.mean(axis=1).var(ddof=1)) / len(table) for table in tables]
    residuals = [_residual(table) for table in tables]
    parts = _parts(over_seeds, over_scenarios, residuals, [len(table) for table in tables], count)
    effect = _effect(float(difference_C.mean()), parts, _freedom(over_seeds, over_scenarios, residuals, tables))
    rates = [np.asarray(side, float).mean(axis=0).clip(0.0, 1.0) for side in (before, after)]
    return _with_inner(effect, rates[0], rates[1], over_scenarios, sum(residuals), min(map(len, tables)))


def _with_inner(
    effect: Effect, before_C: Any, after_C: Any, over_scenarios: float, residual: float, seeds: int
) -> Effect:
    """Return the effect with an interval that includes the one within the seeds. before_C, after_C: success rates by
    scenario over the seeds."""
    design = min(max(over_scenarios / residual, 1.0), seeds) if residual else seeds
    count = seeds / design  # pairs for each scenario
    low, high = newcombe(
        both=count * float((before_C * after_C).sum()),
        gained=count * float(((1 - before_C) * after_C).sum()),
        lost=count * float((before_C * (1 - after_C)).sum()),
        neither=count * float(((1 - before_C) * (1 - after_C)).sum()),
    )
    return replace(effect, low=min(effect.low, low), high=max(effect.high, high))


def _residual(table: Any) -> float:
    """Return the residual mean square of a two-way table, divided by the number of its cells."""
    seeds, scenarios = table.shape
    residual_SC = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + table.mean()
    return float((residual_SC**2).sum()) / ((seeds - 1) * (scenarios - 1)) / (seeds * scenarios)


def _parts(
    over_seeds: Sequence[float],
    over_scenarios: float,
    residuals: Sequence[float],
    counts: Sequence[int],
    scenarios: int,
) -> VarianceParts:
    """Return the parts of the variance, whose sum is at least `over_seeds` and at least `over_scenarios`."""
    seeds, residual = sum(over_seeds), sum(residuals)
    total = max(seeds, over_scenarios, seeds + over_scenarios - residual)
    lasting = max(0.0, over_scenarios - residual)
    weights = [part / seeds if seeds else 1 / len(over_seeds) for part in over_seeds]
    reducible = tuple(((total - lasting) * weight, count) for weight, count in zip(weights, counts, strict=True))
    return VarianceParts(reducible, lasting, scenarios)


def _freedom(over_seeds: Sequence[float], over_scenarios: float, residuals: Sequence[float], tables: Any) -> float:
    """Return Satterthwaite's degrees of freedom of the variance of the mean."""
    scenarios = tables[0].shape[1]
    total = max(sum(over_seeds), over_scenarios, sum(over_seeds) + over_scenarios - sum(residuals))
    spread = over_scenarios**2 / (scenarios - 1)
    for seeds, residual, table in zip(over_seeds, residuals, tables, strict=True):
        spread += seeds**2 / (len(table) - 1) + residual**2 / ((len(table) - 1) * (scenarios - 1))
    return total**2 / spread if spread else math.inf


def _effect(difference: float, parts: VarianceParts, freedom: float) -> Effect:
    from scipy.stats import t

    error = math.sqrt(parts.variance())
    half = float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * error if error else 0.0
    return Effect(difference, max(difference - half, -1.0), min(difference + half, 1.0), parts.count, parts)


def power(effect: float, error: float, freedom: float) -> float:
    """Return the power of the two-sided t test at 5 % for a true effect with this standard error."""
    from scipy.stats import nct, norm, t

    if not error:
        return 1.0 if effect else 0.0
    shift, critical = abs(effect) / error, float(t.ppf((1 + CONFIDENCE) / 2, freedom))
    if freedom > 1e4 or shift > 30:
        return float(norm.sf(critical - shift) + norm.cdf(-critical - shift))
    return float(nct.sf(critical, freedom, shift) + nct.cdf(-critical, freedom, shift))


def more_seeds(effect: Effect) -> int | None:
    """Return the number of further seeds on each side with which the observed effect is decided at 80 % power, given
    the observed variance. None if more than MOST_SEEDS would be needed, because the scenarios limit the precision or
    the effect is too small."""

    if not effect.parts.variance():
        return None  # no variation is observed, so it predicts nothing

    def enough(more: int) -> bool:
        error = math.sqrt(effect.parts.variance(more))
        return power(effect.difference, error, effect.parts.freedom(more)) >= POWER

    return smallest(enough, MOST_SEEDS, start=1)


def smallest(enough: Callable[[int], bool], most: int, *, start: int) -> int | None:
    """Return the smallest number from `start` to `most` that is enough; None if `most` is not. enough: monotonic."""
    if not enough(most):
        return None
    low, high = start - 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def scenarios_for(effect: Effect) -> int | None:
    """Return the number of scenarios below which no number of seeds decides the observed effect at 80 % power. None
    without an effect."""
    if not effect.difference:
        return None
    variance = effect.parts.scenarios * effect.parts.count
    return max(2, math.ceil(variance * (_Z / effect.difference) ** 2))


_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) + NormalDist().inv_cdf(POWER)


def paired_scenarios(gain: float, discordance: float) -> int:
    """Return the number of scenarios with which a paired test of two policies detects a gain at 80 % power.

    discordance: share of scenarios that exactly one of the two solves; at least the gain. Connor 1987 (Biometrics
    43:207): n = (z_α √ψ + z_β √(ψ - δ²))² / δ².
    """
    share, gain = max(discordance, abs(gain)), abs(gain)
    half, quantile = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), NormalDist().inv_cdf(POWER)
    return math.ceil((half * math.sqrt(share) + quantile * math.sqrt(max(share - gain**2, 0.0))) ** 2 / gain**2)


@dataclass(frozen=True)
class Verdict:
    """Verdict on one side against the baseline."""

    side: str
    baseline: str
    verdict: Outcome | None
    """None: there is nothing to compare."""
    seeds: Mapping[str, Sequence[int]]
    """Seeds of both sides."""
    effect: float | None = None
    """Difference in held-out success."""
    low: float | None = None
    high: float | None = None
    scenarios: int = 0
    """Number of held-out scenarios that all compared runs finished."""
    method: str = "none"
    more_seeds: int | None = None
    """Further seeds on each side that would decide an undecided verdict at 80 % power; None if unknown or too many."""
    advice: str = ""
    """Way to a decision, or the scope of the verdict."""

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON data."""
        return {
            "side": self.side,
            "baseline": self.baseline,
            "verdict": self.verdict,
            "effect": self.effect,
            "interval": None if self.low is None else [self.low, self.high],
            "seeds": {side: list(seeds) for side, seeds in self.seeds.items()},
            "scenarios": self.scenarios,
            "method": self.method,
            "more_seeds": self.more_seeds,
            "advice": self.advice,
        }

    def text(self) -> str:
        """Return the verdict as a line of text."""
        interval = "" if self.low is None else f" [{self.low:+.3f}, {self.high:+.3f}]"
        figures = "" if self.effect is None else f": success {self.effect:+.3f}{interval}"
        counts = {len(seeds) for seeds in self.seeds.values()}
        sizes = " and ".join(map(str, sorted(counts)))
        basis = f" over {sizes} seed{'s' * (counts != {1})} and {self.scenarios} scenarios" if self.scenarios else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.side} against {self.baseline}: {self.verdict or 'no verdict'}{figures}{basis}{advice}"


def seeded_verdict(
    names: tuple[str, str], before: Mapping[int, Sequence[float]], after: Mapping[int, Sequence[float]]
) -> Verdict:
    """Return the verdict on a side against the baseline. names: of the baseline and the side. before, after: success on
    the same scenarios in the same order, by seed."""
    baseline, side = names
    paired = before.keys() == after.keys()
    order = sorted(before) if paired else list(before)
    result = seeded_effect(
        [before[seed] for seed in order], [after[seed] for seed in (order if paired else after)], paired=paired
    )
    further = more_seeds(result) if result.outcome == "undecided" else None
    return Verdict(
        side,
        baseline,
        result.outcome,
        {baseline: sorted(before), side: sorted(after)},
        result.difference,
        result.low,
        result.high,
        result.scenarios,
        f"{CROSSED}, {'paired by seed and scenario' if paired else 'paired by scenario'}",
        further,
        _advice(result, further),
    )


def _advice(effect: Effect, further: int | None) -> str:
    """Return the way to a decision of an undecided effect."""
    if effect.outcome != "undecided":
        return ""
    if further is not None:
        count = f"{further} more seed{'s' * (further != 1)} on each side"
        return f"if the effect is as observed, {count} would decide it at {POWER:.0%} power".replace("%", " %")
    if effect.difference and effect.parts.scenarios:
        needed = scenarios_for(effect)
        return f"more seeds alone cannot decide it: an effect of this size needs at least {needed} held-out scenarios"
    return "the outcomes are too equal to say how many seeds would decide it: evaluate on more held-out scenarios"
