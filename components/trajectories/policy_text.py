"""Text of a policy in an episode, and the share of identical episodes."""

from __future__ import annotations

import hashlib
from collections import Counter

from components.trajectories.schema import Trajectory

NGRAM = 3
"""N-gram length in tokens for the detection of repetition."""

PolicyMessages = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


def policy_messages(trajectory: Trajectory) -> PolicyMessages:
    """Return text and calls of each assistant message, in order."""
    return tuple(
        (message.content, tuple((call.name, call.arguments) for call in message.tool_calls))
        for history in trajectory.histories
        for message in history.messages
        if message.role == "assistant"
    )


def text(trajectory: Trajectory) -> str:
    """Return text and calls of each assistant message as readable text."""
    lines = [
        " ".join([*([content] if content else []), *(f"{name}({arguments})" for name, arguments in calls)])
        for content, calls in policy_messages(trajectory)
    ]
    return "\n".join(lines)


class IdenticalTexts:
    """Count of identical policy texts in a stream of episodes. A digest is held for each distinct text of a group."""

    def __init__(self) -> None:
        self._groups: dict[str, Counter[bytes]] = {}
        self._solved: dict[str, Counter[bytes]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Count a trajectory if it finished."""
        if trajectory.failure is None:
            content = repr(policy_messages(trajectory)).encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(content, digest_size=16).digest()
            self._groups.setdefault(trajectory.group, Counter())[digest] += 1
            self._solved.setdefault(trajectory.group, Counter())[digest] += trajectory.success

    def shares(self) -> tuple[float | None, float | None]:
        """Return the share of pairs of finished episodes with identical policy text that did not both succeed, first
        within groups, then between groups. None if there is no pair. Identical successes do not count, because a task
        may have only one right answer."""
        groups, solved = self._groups, self._solved
        all_counts: Counter[bytes] = Counter()
        all_solved: Counter[bytes] = Counter()
        for name in groups:
            all_counts.update(groups[name])
            all_solved.update(solved[name])
        pairs_within = sum(_pairs(group.total()) for group in groups.values())
        within = sum(_identical_pairs(groups[name], solved[name]) for name in groups)
        pairs_between = _pairs(all_counts.total()) - pairs_within
        between = _identical_pairs(all_counts, all_solved) - within
        return (
            within / pairs_within if pairs_within else None,
            between / pairs_between if pairs_between else None,
        )


def _identical_pairs(counts: Counter[bytes], solved: Counter[bytes]) -> int:
    """Return the number of identical pairs that did not both succeed."""
    return sum(_pairs(count) - _pairs(solved[content]) for content, count in counts.items())


def _pairs(count: int) -> int:
    return count * (count - 1) // 2
