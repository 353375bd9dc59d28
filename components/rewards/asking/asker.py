"""Asks one model: what is known already is not asked again, the rest within the limits and the budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from components.rewards.asking.kept import KeptAnswers, digest
from components.rewards.asking.limits import Limits
from components.rewards.asking.spec import (
    EmbeddedJudge,
    JudgeModel,
    LiteLLMJudge,
    PaidSpec,
    PolicyJudge,
    PriceSpec,
    ServedJudge,
)
from components.rewards.protocol import Means

CHARACTERS_PER_TOKEN = 4
"""For a first guess of what a request needs, corrected by what it did."""

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
    cost: float | None = None
    """What it costs, paid now or before; None where that is not known."""
    asked: str = ""
    """Digest of the question."""


class Way(Protocol):
    """How to reach a model."""

    who: str
    """For messages: the model, and where."""
    price: PriceSpec | None
    """None: `call` says what each answer costs, or nobody knows."""
    price_known: bool

    async def call(self, messages: Messages, schema: dict[str, Any] | None) -> Answer:
        """One answer. schema: that of the JSON that is wanted, for models that can be held to it. Raises JudgeError,
        ResourceError."""
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

    async def ask(self, messages: Messages, schema: dict[str, Any] | None = None, repeat: int = 0) -> Answer:
        """One answer. repeat: asks the same once more, as another question. Raises BudgetSpent, JudgeError,
        ResourceError."""
        asked = digest([self._identity, messages, schema, repeat])
        if self._kept is not None and (found := self._kept.find(asked)) is not None:
            self._meter.kept += 1
            return self._priced(Answer(**found, asked=asked))
        self._meter.begin(self.name, self._way.price_known)
        try:
            expected = sum(len(one["content"]) for one in messages) / CHARACTERS_PER_TOKEN
            await self._limits.wait(expected)
            answer = self._priced(replace(await self._way.call(messages, schema), asked=asked))
        except BaseException:
            self._meter.gave_up()
            raise
        prompt, completion = answer.prompt_tokens or 0, answer.completion_tokens or 0
        self._limits.used(expected, prompt + completion)
        self._meter.end(answer.cost, prompt, completion)
        return answer

    def keep(self, *answers: Answer) -> None:
        """Keeps answers that were understood."""
        if self._kept is not None:
            names = ("text", "prompt_tokens", "completion_tokens", "cut_off", "refusal")
            given = self._way.price is None and self._way.price_known
            rows = {one.asked: {name: getattr(one, name) for name in names} for one in answers}
            self._kept.keep({one.asked: rows[one.asked] | ({"cost": one.cost} if given else {}) for one in answers})

    def close(self) -> None:
        self._way.close()
        if self._kept is not None:
            self._kept.close()

    def _priced(self, answer: Answer) -> Answer:
        price = self._way.price
        if price is None:
            return answer
        if answer.prompt_tokens is None or answer.completion_tokens is None:
            return replace(answer, cost=None)
        read, written = answer.prompt_tokens * price.input, answer.completion_tokens * price.output
        return replace(answer, cost=(read + written) / 1_000_000)


def added(one: float | None, other: float | None) -> float | None:
    """The sum of two costs; not known where one is not."""
    return None if one is None or other is None else one + other


def _way(spec: JudgeModel, means: Means) -> Way:
    if isinstance(spec, ServedJudge):
        from components.rewards.asking.served import Served

        return Served(spec)
    if isinstance(spec, LiteLLMJudge):
        from components.rewards.asking.providers import Provided

        return Provided(spec)
    assert isinstance(spec, EmbeddedJudge | PolicyJudge)
    from components.rewards.asking.embedded import Embedded

    return Embedded(spec, means)
