"""Filter that drops exact duplicates and near duplicates of other episodes. Near duplicates have a high Jaccard
similarity:

    J(a, b) = |a ∩ b| / |a ∪ b|        of the sets of shingles: every run of w words (Broder, 1997)

The search is exact. Prefix filtering avoids most comparisons (Chaudhuri, Ganti, Kaushik, ICDE 2006): if J(a, b) >= t,
the two share at least ⌈t·|a|⌉ and at least ⌈t·|b|⌉ shingles. So in any fixed order of shingles, the first shared one is
among the first |a| - ⌈t·|a|⌉ + 1 of a, and among the first |b| - ⌈t·|b|⌉ + 1 of b. Only texts that share a shingle in
these prefixes are compared. Shingles are ordered by their 64-bit digests.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from components.filters.decisions import best_first, decide_each
from components.filters.protocol import Filter, Groups
from components.specs.registered import registered
from components.trajectories.schema import Message, Selection, Trajectory

DUPLICATE, NEAR_DUPLICATE = "duplicate", "near_duplicate"

Read = Literal["answers", "conversation"]


@registered("filter.distinct")
class Distinct:
    """Filter that keeps one episode of each set of duplicates: the one with the highest reward, ties to the earlier.

    Args:
        read: Compared text. `answers`: the policy's messages only. `conversation`: all messages.
        similarity: Threshold for near duplicates: Jaccard similarity of their word shingles, above 0, at most 1. null:
            drop exact duplicates only, which have the same token ids where the policy sampled, and the same texts and
            tool calls elsewhere.
        words: Words per shingle.
        of: Scope of the comparison: the episode's own `group`, or the whole `collection`. In a collection, earlier
            groups take precedence over later ones.
        compared: With `collection`: number of most recently kept episodes searched for near duplicates. Exact
            duplicates are searched in all.

    Memory with `collection`: about 130 bytes per episode; with a similarity, also about 130 bytes per word of the
    compared episodes.
    """

    def __init__(
        self,
        read: Read = "answers",
        similarity: Annotated[float, Field(gt=0, le=1)] | None = None,
        words: Annotated[int, Field(ge=1)] = 3,
        of: Literal["group", "collection"] = "group",
        compared: Annotated[int, Field(ge=1)] = 1_000,
    ):
        self.read = read
        self.similarity = similarity
        self.words = words
        self.of = of
        self.per_group = of == "group"
        self.compared = compared

    def survey(self, groups: Groups) -> Filter:
        if self.of == "group":
            return _PerGroup(self)
        index = self.empty_index()
        return _ByRule({name: rule for group in groups() for name, rule in index.duplicates(group).items()})

    def empty_index(self) -> _Index:
        """Return an index without episodes."""
        return _Index(self.read, self.similarity, self.words, self.compared)


class _Index:
    """Index of the kept episodes."""

    def __init__(self, read: Read, similarity: float | None, words: int, compared: int):
        self._read: Read = read
        self._words = words
        self._exact: set[bytes] = set()
        self._near = None if similarity is None else SimilarityIndex(similarity, compared)

    def duplicates(self, group: Sequence[Trajectory]) -> dict[str, str]:
        """Add a group, best reward first. Return the reason by id of each scored trajectory that is a duplicate."""
        rules = {}
        for trajectory in best_first(group):
            if (rule := self._add(trajectory)) is not None:
                rules[trajectory.id] = rule
        return rules

    def _add(self, trajectory: Trajectory) -> str | None:
        digest = hashlib.blake2b(repr(list(_identity(trajectory, self._read))).encode(), digest_size=16).digest()
        if digest in self._exact:
            return DUPLICATE
        text = (
            shingles("\n".join(map(_text, _messages(trajectory, self._read))), self._words)
            if self._near
            else frozenset()
        )
        if self._near is not None:
            if self._near.has_similar(text):
                return NEAR_DUPLICATE
            self._near.add(text)
        self._exact.add(digest)
        return None


class _PerGroup:
    def __init__(self, spec: Distinct):
        self._spec = spec

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return _ByRule(self._spec.empty_index().duplicates(group)).select(group)


class _ByRule:
    def __init__(self, rules: dict[str, str]):
        self._rules = rules
        """Reason by id of each dropped trajectory."""

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return decide_each(group, lambda trajectory: self._rules.get(trajectory.id))


def _messages(trajectory: Trajectory, read: Read) -> Iterator[Message]:
    for history in trajectory.histories:
        for message in history.messages:
            if read == "conversation" or message.role == "assistant":
                yield message


def _identity(trajectory: Trajectory, read: Read) -> Iterator[object]:
    """Yield the parts that exact duplicates have in common: token ids where available, else texts."""
    for history in trajectory.histories:
        if read == "conversation" and history.token_ids:
            yield history.token_ids
            continue
        for message in history.messages:
            if message.span is not None:
                yield history.token_ids[slice(*message.span)]
            elif read == "conversation" or message.role == "assistant":
                yield message.role, _text(message)


def _text(message: Message) -> str:
    calls = (f"{call.name} {call.arguments}" for call in message.tool_calls)
    return "\n".join([message.content, *calls])


_WORD = re.compile(r"\w+")


def shingles(text: str, words: int) -> frozenset[int]:
    """Return 64-bit digests of every run of `words` words, ignoring case and punctuation.

    A shorter text has one shingle of all its words; a text without words has none.
    """
    all_words = _WORD.findall(text.lower())
    runs = (
        {" ".join(all_words[start : start + words]) for start in range(max(1, len(all_words) - words + 1))}
        if all_words
        else ()
    )
    return frozenset(map(_digest, runs))


def jaccard(first: frozenset[int], second: frozenset[int]) -> float:
    """Return the Jaccard similarity, 0 to 1. It is 0 if both sets are empty: texts without words are not comparable."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared) if shared else 0.0


class SimilarityIndex:
    """Index of the `capacity` texts that were added last."""

    def __init__(self, similarity: float, capacity: int):
        self.similarity = similarity
        self.capacity = capacity
        self._texts: dict[int, frozenset[int]] = {}
        self._numbers_by_shingle: defaultdict[int, set[int]] = defaultdict(set)
        """Numbers of the texts whose prefix contains the shingle, by shingle."""
        self._added = 0

    def has_similar(self, text: frozenset[int]) -> bool:
        """Return True if the similarity of `text` to an indexed text reaches the threshold."""
        near = {number for shingle in self._prefix(text) for number in self._numbers_by_shingle.get(shingle, ())}
        return any(jaccard(text, self._texts[number]) >= self.similarity for number in near)

    def add(self, text: frozenset[int]) -> None:
        """Add a text. Remove the oldest one if there are more than `capacity`."""
        self._texts[self._added] = text
        for shingle in self._prefix(text):
            self._numbers_by_shingle[shingle].add(self._added)
        self._added += 1
        if len(self._texts) > self.capacity:
            self._remove(next(iter(self._texts)))

    def _remove(self, number: int) -> None:
        for shingle in self._prefix(self._texts.pop(number)):
            self._numbers_by_shingle[shingle].discard(number)
            if not self._numbers_by_shingle[shingle]:
                del self._numbers_by_shingle[shingle]

    def _prefix(self, text: frozenset[int]) -> list[int]:
        shared = math.ceil(self.similarity * len(text) - 1e-9)  # rounding may lengthen the prefix, never shorten it
        return sorted(text)[: len(text) - shared + 1]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
