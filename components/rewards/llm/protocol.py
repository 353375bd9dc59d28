"""The protocol of a judge model: messages, answers, and the connection to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """What a model said."""

    text: str
    prompt_tokens: int | None = None
    """None: it did not say."""
    completion_tokens: int | None = None
    cut_off: bool = False
    """It ended at the most tokens that it may write."""
    refusal: str = ""
    """Why it does not answer, where it says so apart from its text."""
    share: float = 1.0
    """Of the price, that is paid: less for an answer of a batch."""
    cost: float | None = None
    """What it costs, paid now or before; None where that is not known."""
    asked: str = ""
    """Digest of the question."""


class ModelClient(Protocol):
    """How to reach a model."""

    who: str
    """For messages: the model, and where."""
    priced: bool
    """Whether it is known what it costs."""

    def price(self, read: int, written: int) -> float:
        """Of so many tokens, where it is known."""
        ...

    async def call(self, messages: Messages, schema: dict[str, Any] | None, asked: str, at_once: bool) -> Answer:
        """One answer, without its cost. schema: that of the JSON that is wanted, for models that can be held to it.
        asked: digest of the question. at_once: not in a batch. Raises JudgeError, ResourceError."""
        ...

    def close(self) -> None: ...


def add_costs(one: float | None, other: float | None) -> float | None:
    """The sum of two costs; not known where one is not."""
    return None if one is None or other is None else one + other
