"""Asks one model: what is known already is not asked again, the rest within the limits and the budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from components.rewards.asking.kept import KeptAnswers, digest
from components.rewards.asking.limits import Guess, Limits
from components.rewards.asking.spec import (
    EmbeddedJudge,
    JudgeModel,
    LiteLLMJudge,
    PaidSpec,
    PolicyJudge,
    ServedJudge,
)
from components.rewards.protocol import Means

KEPT = ("text", "prompt_tokens", "completion_tokens", "cut_off", "refusal", "share")
"""Of an answer."""

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


class Way(Protocol):
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


class Asker:
    """One model, for one stage."""

    def __init__(self, spec: JudgeModel, means: Means):
        self.spec = spec
        self._way = _way(spec, means)
        self.name = self._way.who
        self._meter = means.meter
        self._kept = KeptAnswers(means.answers) if means.answers is not None else None
        self._identity = [spec.key_part() | {"price": None}, getattr(self._way, "version", "")]
        paid = spec if isinstance(spec, PaidSpec) else None
        self._limits = Limits(paid.requests_per_minute, paid.tokens_per_minute) if paid else Limits(None, None)
        self._guess = Guess(spec.max_tokens)

    async def ask(
        self, messages: Messages, schema: dict[str, Any] | None = None, repeat: int = 0, at_once: bool = False
    ) -> Answer:
        """One answer. repeat: asks the same once more, as another question. at_once: not in a batch. Raises
        BudgetSpent, JudgeError, ResourceError."""
        asked = digest([self._identity, messages, schema, repeat])
        if self._kept is not None and (found := self._kept.find(asked)) is not None:
            self._meter.kept += 1
            return self._priced(Answer(**found, asked=asked))
        characters = sum(len(one["content"]) for one in messages)
        least = self._way.price(int(self._guess.read(characters)), 0) if self._way.priced else None
        self._meter.begin(self.name, least)
        try:
            expected = await self._limits.wait(lambda: self._guess.read(characters) + self._guess.written())
            answer = self._priced(replace(await self._way.call(messages, schema, asked, at_once), asked=asked))
        except BaseException:
            self._meter.gave_up()
            raise
        prompt, completion = answer.prompt_tokens or 0, answer.completion_tokens or 0
        if answer.prompt_tokens is not None and answer.completion_tokens is not None:
            self._limits.used(expected, prompt + completion)
            self._guess.learn(characters, prompt, completion)
        self._meter.end(answer.cost, prompt, completion)
        return answer

    def keep(self, *answers: Answer) -> None:
        """Keeps answers that were understood; not their costs, which follow from the price as it is."""
        if self._kept is not None:
            self._kept.keep({one.asked: {name: getattr(one, name) for name in KEPT} for one in answers})

    def close(self) -> None:
        self._way.close()
        if self._kept is not None:
            self._kept.close()

    def _priced(self, answer: Answer) -> Answer:
        read, written = answer.prompt_tokens, answer.completion_tokens
        if not self._way.priced or read is None or written is None:
            return replace(answer, cost=None)
        return replace(answer, cost=answer.share * self._way.price(read, written))


def added(one: float | None, other: float | None) -> float | None:
    """The sum of two costs; not known where one is not."""
    return None if one is None or other is None else one + other


def _way(spec: JudgeModel, means: Means) -> Way:
    if isinstance(spec, ServedJudge):
        from components.rewards.asking.served import Served

        return Served(spec, means.answers, means.waiting)
    if isinstance(spec, LiteLLMJudge):
        from components.rewards.asking.providers import Provided

        return Provided(spec)
    assert isinstance(spec, EmbeddedJudge | PolicyJudge)
    from components.rewards.asking.embedded import Embedded

    return Embedded(spec, means)
