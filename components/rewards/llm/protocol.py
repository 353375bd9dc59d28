"""Protocol of a judge model: messages, answers, and the client of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class JudgeAnswer:
    """Answer of a model."""

    text: str
    prompt_tokens: int | None = None
    """Tokens of the prompt; None if the server does not report them."""
    completion_tokens: int | None = None
    cut_off: bool = False
    """True if the answer ended at its token limit."""
    refusal: str = ""
    """Refusal of the model, if the server reports it apart from the text."""
    share: float = 1.0
    """Share of the price that is paid: less than 1 for an answer of a batch."""
    cost: float | None = None
    """Cost, paid now or by an earlier run; None if unknown."""
    question_digest: str = ""
    """Digest of the question; the key of the answer cache."""


class ModelClient(Protocol):
    """Client of a model."""

    label: str
    """Description for messages: the model and its location."""
    priced: bool
    """True if the price is known."""

    def price(self, read: int, written: int) -> float:
        """Return the cost of these numbers of prompt and completion tokens. Requires `priced`."""
        ...

    async def call(
        self, messages: Messages, schema: dict[str, Any] | None, question_digest: str, immediate: bool
    ) -> JudgeAnswer:
        """Return one answer, without its cost. schema: JSON schema of the answer, for models that support structured
        output. immediate: bypass batching. Raises JudgeError, ResourceError."""
        ...

    def close(self) -> None: ...


def add_costs(first: float | None, second: float | None) -> float | None:
    """Return the sum of two costs; None if one is unknown."""
    return None if first is None or second is None else first + second
