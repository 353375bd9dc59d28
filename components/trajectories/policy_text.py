"""What a policy said in an episode, and how much of it is always the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from components.trajectories.schema import Trajectory

NGRAM = 3
"""Tokens of which a repetition is looked for."""

Said = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


def said(trajectory: Trajectory) -> Said:
    """All that the policy said: text and calls of each of its messages, in order."""
    return tuple(
        (one.content, tuple((call.name, call.arguments) for call in one.tool_calls))
        for history in trajectory.histories
        for one in history.messages
        if one.role == "assistant"
    )


def text(trajectory: Trajectory) -> str:
    """The same for people to read."""
    lines = [
        " ".join([*([content] if content else []), *(f"{name}({arguments})" for name, arguments in calls)])
        for content, calls in said(trajectory)
    ]
    return "\n".join(lines)


def identical(trajectories: Iterable[Trajectory]) -> tuple[float | None, float | None]:
    """Shares of the pairs of finished episodes that say the same and did not both succeed: of the pairs of one group,
    and of the pairs of different groups. None where there is no such pair. That two who succeed say the same is no
    fault: there may be one right answer."""
    groups: dict[str, Counter[Said]] = {}
    solved: dict[str, Counter[Said]] = {}
    for one in trajectories:
        if one.failure is None:
            what = said(one)
            groups.setdefault(one.group, Counter())[what] += 1
            solved.setdefault(one.group, Counter())[what] += one.success
    everything: Counter[Said] = Counter()
    good: Counter[Said] = Counter()
    for name in groups:
        everything.update(groups[name])
        good.update(solved[name])
    pairs_within = sum(_pairs(group.total()) for group in groups.values())
    within = sum(_alike(groups[name], solved[name]) for name in groups)
    pairs_between = _pairs(everything.total()) - pairs_within
    between = _alike(everything, good) - within
    return (
        within / pairs_within if pairs_within else None,
        between / pairs_between if pairs_between else None,
    )


def _alike(counts: Counter[Said], solved: Counter[Said]) -> int:
    return sum(_pairs(count) - _pairs(solved[what]) for what, count in counts.items())


def _pairs(count: int) -> int:
    return count * (count - 1) // 2
