"""Drift of a judge: two judgements of the same episodes, compared by group.

The unit is the group of episodes of one scenario, since a relative judge scores them together. With b_i the score of
episode i at the first judgement, c_i at a control judgement of the same time and x_i at a later judgement, a group has

    d = mean(x_i - b_i)                                                    shift, over episodes scored in both
    f = flips(b, x) - flips(b, c)                                          excess of flips
    u = share of unscored episodes in x - share of unscored episodes in b

where flips(b, x) is the share of pairs i < j with sign(x_i - x_j) ≠ sign(b_i - b_j). A pair that becomes a tie, or was
one, has changed its order, too. The control is the noise of the judge: it flips pairs without any drift.

If the judge has not changed, its judgements of a group are exchangeable: swapping x with b negates d and u, swapping x
with c negates f. So each is symmetric around zero, whatever the distribution of the judge's noise, and the signed-rank
test (Wilcoxon 1945, Biometrics Bulletin 1:80) is exact with the null distribution of the observed ranks, ties included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from components.evaluation.metrics import bootstrap
from components.trajectories.groups import RELATIVE_TOLERANCE

Scores = Mapping[str, float | None]
"""Scores by episode id; None: unscored."""

TESTS = 3
"""Number of tests of a comparison: shift, flips, unscored."""


def compare_judgements(
    groups: Sequence[Sequence[str]], *, first: Scores, control: Scores, later: Scores
) -> dict[str, float]:
    """Return the metrics of a later judgement against the first. groups: episode ids by group. control: another
    judgement made together with the first.

    The result has `shift` with its 95 % interval over groups (`shift_low`, `shift_high`), `flips` (share of pairs) and
    `flips_control`, `unscored` and `unscored_first`, and the p-values (`p_values`). What cannot be measured is
    absent."""
    metrics = {"groups": float(len(groups))}
    if shifts := _shifts(groups, first, later):
        low, high = bootstrap([[shift] for shift in shifts])
        metrics["shift"] = fmean(shifts)
        metrics |= {"shift_low": low, "shift_high": high} if low is not None and high is not None else {}
    if flips := _flips(groups, first, control, later):
        metrics["flips_control"], metrics["flips"] = (
            fmean(itertools.chain(*part)) for part in zip(*flips, strict=True)
        )
    episodes = [episode for group in groups for episode in group]
    for name, scores in (("unscored_first", first), ("unscored", later)):
        metrics[name] = _unscored(episodes, scores)
    return metrics | p_values(groups, first=first, control=control, later=later)


def p_values(groups: Sequence[Sequence[str]], *, first: Scores, control: Scores, later: Scores) -> dict[str, float]:
    """Return the p-values of the signed-rank tests that the judge has not changed: `shift_p` two-sided, `flips_p` and
    `unscored_p` one-sided, for a rise. What cannot be tested is absent."""
    values = {}
    if shifts := _shifts(groups, first, later):
        values["shift_p"] = signed_rank_p(shifts, two_sided=True)
    if flips := _flips(groups, first, control, later):
        values["flips_p"] = signed_rank_p([fmean(now) - fmean(noise) for noise, now in flips])
    values["unscored_p"] = signed_rank_p([_unscored(group, later) - _unscored(group, first) for group in groups])
    return values


def flipped_pairs(group: Sequence[str], first: Scores, later: Scores) -> list[bool]:
    """Return for each pair of a group's episodes that are scored in both judgements whether its order differs."""
    pairs = [(first.get(episode), later.get(episode)) for episode in group]
    scored = [(b, x) for b, x in pairs if b is not None and x is not None]
    return [_order(b1, b2) != _order(x1, x2) for (b1, x1), (b2, x2) in itertools.combinations(scored, 2)]


def signed_rank_p(differences: Sequence[float], *, two_sided: bool = False) -> float:
    """Return the exact p-value of the signed-rank test that the differences are symmetric around zero, against larger
    ones. two_sided: against larger or smaller ones. Zeros are left out, tied absolute values have their mean rank, and
    the null distribution is that of the observed ranks with random signs."""
    import numpy as np

    values = [difference for difference in differences if difference]
    if not values:
        return 1.0
    ranks = _doubled_ranks([abs(value) for value in values])
    total = sum(ranks)
    chances = np.zeros(total + 1)  # of each sum of the ranks with a positive sign
    chances[0] = 1.0
    for rank in ranks:
        shifted = np.zeros_like(chances)
        shifted[rank:] = chances[: total + 1 - rank]
        chances = (chances + shifted) / 2
    observed = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    upper = float(chances[observed:].sum())
    if not two_sided:
        return min(upper, 1.0)
    return min(2 * min(upper, float(chances[: observed + 1].sum())), 1.0)


def smallest_p(groups: int) -> float:
    """Return the smallest two-sided p-value that a number of groups can reach: all change in the same direction."""
    return min(2.0 * 0.5**groups, 1.0)


def level(alpha: float, rounds: int) -> float:
    """Return the level of one test, so that a false alarm in any of the compared rounds has a probability of at most
    alpha, however the tests depend on each other (Bonferroni)."""
    return alpha / (TESTS * max(rounds, 1))


def _doubled_ranks(sizes: Sequence[float]) -> list[int]:
    """Return twice the rank of each value, from 1; tied values have their mean rank, so that all are integers. Values
    that differ by rounding errors are tied."""
    from scipy.stats import rankdata

    return [int(2 * rank) for rank in rankdata([float(f"{size:.9g}") for size in sizes])]


def _shifts(groups: Sequence[Sequence[str]], first: Scores, later: Scores) -> list[float]:
    """Return the shift of each group that has an episode scored in both."""
    return [shift for group in groups if (shift := _shift(group, first, later)) is not None]


def _flips(
    groups: Sequence[Sequence[str]], first: Scores, control: Scores, later: Scores
) -> list[tuple[list[bool], list[bool]]]:
    """Return the flipped pairs of the control and of the later judgement, of each group that has pairs in both."""
    flips = [(flipped_pairs(group, first, control), flipped_pairs(group, first, later)) for group in groups]
    return [(noise, now) for noise, now in flips if noise and now]


def _shift(group: Sequence[str], first: Scores, later: Scores) -> float | None:
    pairs = [(first.get(episode), later.get(episode)) for episode in group]
    scored = [(b, x) for b, x in pairs if b is not None and x is not None]
    if not scored:
        return None
    shift = fmean(x - b for b, x in scored)
    rounding = RELATIVE_TOLERANCE * max(abs(score) for pair in scored for score in pair)
    return 0.0 if abs(shift) <= rounding else shift


def _unscored(group: Sequence[str], scores: Scores) -> float:
    return fmean(scores.get(episode) is None for episode in group)


def _order(first: float, second: float) -> int:
    """Return 1, -1, or 0 for scores that are equal except for rounding."""
    return 0 if math.isclose(first, second, rel_tol=RELATIVE_TOLERANCE) else 1 if first > second else -1
