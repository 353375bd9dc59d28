"""Drops episodes that say what another one has said: exactly, or nearly (`components.filters.similar`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from components.filters.decisions import best_first, decide_each
from components.filters.protocol import Filter, Groups
from components.filters.similar import Texts, shingles
from components.specs.registered import registered
from components.trajectories.schema import Message, Selection, Trajectory

DUPLICATE, NEAR_DUPLICATE = "duplicate", "near_duplicate"

Read = Literal["answers", "conversation"]


@registered("filter.distinct")
class Distinct:
    """Of episodes that say the same, the one with the highest reward is kept, of equal ones the first.

    Args:
        read: `answers`: what the policy said, whatever it was told. `conversation`: all messages.
        similarity: Two are nearly the same where the Jaccard similarity of their word shingles is at least this; above
            0, at most 1. null drops exact duplicates only: the same token ids where the policy's were sampled, the same
            texts and tool calls elsewhere.
        words: Of one shingle.
        of: What they are compared with: their own `group`, or the whole `collection`, where a group that comes earlier
            goes before a later one.
        compared: Of `collection`, near duplicates are looked for among so many of the latest kept episodes; exact ones
            among all.

    In memory: of `collection` about 130 bytes for each episode; with a similarity, as many for each word of those that
    are compared.
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
        self.compared = compared

    def survey(self, groups: Groups) -> Filter:
        if self.of == "group":
            return _OfGroup(self)
        seen = self.nothing()
        return _Known({name: rule for group in groups() for name, rule in seen.repeated(group).items()})

    def nothing(self) -> _Seen:
        """Before the first episode."""
        return _Seen(self.read, self.similarity, self.words, self.compared)


class _Seen:
    """What was said so far."""

    def __init__(self, read: Read, similarity: float | None, words: int, compared: int):
        self._read: Read = read
        self._words = words
        self._exact: set[bytes] = set()
        self._near = None if similarity is None else Texts(similarity, compared)

    def repeated(self, group: Sequence[Trajectory]) -> dict[str, str]:
        """Of the scored trajectories of a group, by id, those that say what was said before, and the reason."""
        found = {}
        for one in best_first(group):
            if (rule := self._add(one)) is not None:
                found[one.id] = rule
        return found

    def _add(self, one: Trajectory) -> str | None:
        exact = hashlib.blake2b(repr(list(_exactly(one, self._read))).encode(), digest_size=16).digest()
        if exact in self._exact:
            return DUPLICATE
        text = shingles("\n".join(map(_text, _messages(one, self._read))), self._words) if self._near else frozenset()
        if self._near is not None:
            if self._near.like(text):
                return NEAR_DUPLICATE
            self._near.add(text)
        self._exact.add(exact)
        return None


class _OfGroup:
    def __init__(self, spec: Distinct):
        self._spec = spec

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return _Known(self._spec.nothing().repeated(group)).select(group)


class _Known:
    def __init__(self, rules: dict[str, str]):
        self._rules = rules
        """By trajectory id: why it is dropped."""

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        return decide_each(group, lambda one: self._rules.get(one.id))


def _messages(trajectory: Trajectory, read: Read) -> Iterator[Message]:
    for history in trajectory.histories:
        for message in history.messages:
            if read == "conversation" or message.role == "assistant":
                yield message


def _exactly(trajectory: Trajectory, read: Read) -> Iterator[object]:
    """What two episodes share that are the same: tokens where there are some, else texts."""
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
