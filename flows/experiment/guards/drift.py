"""Drift: what a round's episodes are like, against the first rounds of the run.

With x_r the figure of round r and F = (x_1 + x_2) / 2, a figure has drifted at round r ≥ 4 where

    x_(r-1) > limit  and  x_r > limit       limit = F · factor, or F + rise
    x_(r-1) < floor  and  x_r < floor       floor = F / factor; only where `both` directions count

A single round never strikes, and neither does the first half of anything: two rounds say what is usual here, two others
that it is so no more.

An agent that learns may need more words, so a rule can ask that success has not clearly risen: with p, n the success
and the finished episodes of two rounds together, it has where

    p_last - p_first > z · √(p_last (1 - p_last) / n_last + p_first (1 - p_first) / n_first)      z = 1.96
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from flows.experiment.guards.rules import numbers

ENDS = 2
"""Rounds at each end that are compared."""
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Look:
    """One round, as far as drift is looked for."""

    figures: Mapping[str, float]
    """By name; those that are not known are not in it."""
    success: float | None = None
    episodes: float = 0.0
    """That ran to their end."""


def first_and_last(rounds: Mapping[int, Look]) -> tuple[list[int], list[int]] | None:
    """The numbers of the rounds that are compared; None before there are four."""
    known = sorted(rounds)
    return (known[:ENDS], known[-ENDS:]) if len(known) >= 2 * ENDS else None


def drifted(
    rounds: Mapping[int, Look],
    name: str,
    words: str,
    *,
    factor: float | None = None,
    rise: float | None = None,
    both: bool = False,
    whatever_success: bool = False,
) -> str | None:
    """What there is to say of a figure that has drifted by `factor`, or by `rise`; None where it has not, where it is
    not known of one of the rounds, or, unless `whatever_success`, where success has clearly risen with it."""
    known = {number: look for number, look in rounds.items() if name in look.figures}
    ends = first_and_last(known)
    if ends is None or max(known) != max(rounds):
        return None
    first, last = ([known[number].figures[name] for number in numbers_] for numbers_ in ends)
    usual = sum(first) / ENDS
    limit = usual * factor if factor is not None else usual + (rise or 0.0)
    floor = usual / factor if both and factor is not None else -math.inf
    up, down = min(last) > limit, max(last) < floor
    if (factor is not None and usual <= 0) or not (up or down) or (not whatever_success and rose_clearly(known)):
        return None
    bound = limit if up else floor
    by = f"{factor:g} times" if factor is not None else f"{rise:g}"
    return (
        f"{words} {'rose' if up else 'fell'} from {usual:.3g} ({numbers(ends[0])}) to {last[0]:.3g} and {last[1]:.3g} "
        f"({numbers(ends[1])}), {'above' if up else 'below'} {bound:.3g} ({by})"
        + ("" if whatever_success else _beside(known))
    )


def rose_clearly(rounds: Mapping[int, Look]) -> bool:
    """Whether success of the last two rounds is above that of the first two by more than chance. False where it is not
    known."""
    found = _success(rounds)
    if found is None:
        return False
    (before, n), (now, m) = found
    return now - before > _Z * math.sqrt(now * (1 - now) / m + before * (1 - before) / n)


def _success(rounds: Mapping[int, Look]) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Share and number of episodes, of the first and the last rounds."""
    ends = first_and_last(rounds)
    if ends is None:
        return None
    found = []
    for end in ends:
        looks = [rounds[number] for number in end]
        count = sum(look.episodes for look in looks)
        if count == 0 or any(look.success is None for look in looks):
            return None
        found.append((sum((look.success or 0.0) * look.episodes for look in looks) / count, count))
    return found[0], found[1]


def _beside(rounds: Mapping[int, Look]) -> str:
    found = _success(rounds)
    if found is None:
        return ""
    return f", while success went from {found[0][0]:.3f} to {found[1][0]:.3f}"
