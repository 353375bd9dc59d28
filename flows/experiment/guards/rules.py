"""Rules that look at a filter, or at two evaluations and the rounds between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from flows.stages import selections

MOST_NAMED = 20
"""Scenarios that a message names."""


def no_signal(label: str, metrics: Mapping[str, float]) -> str | None:
    """What there is to say of a filter with these metrics; None where it kept something, or is not known to have kept
    nothing. label: of the filter stage."""
    if metrics.get("kept") != 0:
        return None
    kept = f"{label} left nothing to train on: none of {metrics.get('dropped', 0):.0f} episodes was kept"
    return f"{kept} ({why})" if (why := selections.counted(selections.reasons(metrics))) else kept


def spans(steps: Sequence[int], rounds: Sequence[int]) -> tuple[list[int], list[int]]:
    """The rounds before the second last of the evaluated steps (since the one before that), and the rounds since.

    Where there were none before, the first round since stands for them: its episodes are those of the policy that was
    evaluated.
    """
    *_, previous, now = steps
    since = [number for number in rounds if previous < number <= now]
    start = steps[-3] if len(steps) > 2 else None
    before = [number for number in rounds if start is not None and start < number <= previous]
    return (before, since) if before else (since[:1], since[1:])


def reward_hacking(
    before: Mapping[int, float],
    since: Mapping[int, float],
    difference: Mapping[str, Any],
    steps: tuple[int, int],
    what: str = "success",
) -> str | None:
    """What there is to say where the mean training reward of the rounds `since` is above that of the rounds `before`
    (reward by round), while held-out success (or `what` it is) fell; None where one of them did not happen.

    difference: what `components.evaluation.metrics.paired_difference` says of the evaluations after these two steps.
    """
    if not rose(before, since) or difference["high"] is None or difference["high"] >= 0:
        return None
    lost = difference["regressed"]
    named = ", ".join(lost[:MOST_NAMED]) + (f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else "")
    return (
        f"training reward rose from {fmean(before.values()):.3f} ({numbers(before)}) to {fmean(since.values()):.3f} "
        f"({numbers(since)}), but held-out {what} fell from {difference['before']:.3f} (step {steps[0]}) to "
        f"{difference['after']:.3f} (step {steps[1]}): {difference['difference']:+.3f} "
        f"[{difference['low']:+.3f}, {difference['high']:+.3f}] on the same {difference['n']} scenarios. Lost: {named}"
    )


def rose(before: Mapping[int, float], since: Mapping[int, float]) -> bool:
    """Whether the mean of the second is above that of the first; False where one is empty."""
    return bool(before) and bool(since) and fmean(since.values()) > fmean(before.values())


def numbers(rounds: Mapping[int, float] | Sequence[int]) -> str:
    """`round 3`, `rounds 3 to 4`."""
    first, last = min(rounds), max(rounds)
    return f"round {first}" if first == last else f"rounds {first} to {last}"
