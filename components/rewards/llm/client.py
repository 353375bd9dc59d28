"""Asks one model: what is known already is not asked again, the rest within the limits and the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from components.rewards.llm.cache import AnswerCache, digest
from components.rewards.llm.protocol import Answer, Messages, ModelClient
from components.rewards.llm.rate_limits import RateLimits, TokenEstimate
from components.rewards.llm.spec import (
    EmbeddedJudge,
    JudgeModel,
    LiteLLMJudge,
    PaidSpec,
    PolicyJudge,
    ServedJudge,
)
from components.rewards.protocol import Means

CACHED_FIELDS = ("text", "prompt_tokens", "completion_tokens", "cut_off", "refusal", "share")
"""Of an answer."""


class JudgeClient:
    """One model, for one stage."""

    def __init__(self, spec: JudgeModel, means: Means):
        self.spec = spec
        self._way = _way(spec, means)
        self.name = self._way.who
        self._meter = means.meter
        self._kept = AnswerCache(means.answers) if means.answers is not None else None
        self._identity = [spec.key_part() | {"price": None}, getattr(self._way, "version", "")]
        paid = spec if isinstance(spec, PaidSpec) else None
        self._limits = RateLimits(paid.requests_per_minute, paid.tokens_per_minute) if paid else RateLimits(None, None)
        self._guess = TokenEstimate(spec.max_tokens)

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
            self._kept.keep({one.asked: {name: getattr(one, name) for name in CACHED_FIELDS} for one in answers})

    def close(self) -> None:
        self._way.close()
        if self._kept is not None:
            self._kept.close()

    def _priced(self, answer: Answer) -> Answer:
        read, written = answer.prompt_tokens, answer.completion_tokens
        if not self._way.priced or read is None or written is None:
            return replace(answer, cost=None)
        return replace(answer, cost=answer.share * self._way.price(read, written))


def _way(spec: JudgeModel, means: Means) -> ModelClient:
    if isinstance(spec, ServedJudge):
        from components.rewards.llm.openai_endpoint import OpenAIClient

        return OpenAIClient(spec, means.answers, means.waiting)
    if isinstance(spec, LiteLLMJudge):
        from components.rewards.llm.providers import LiteLLMClient

        return LiteLLMClient(spec)
    assert isinstance(spec, EmbeddedJudge | PolicyJudge)
    from components.rewards.llm.embedded import LocalModelClient

    return LocalModelClient(spec, means)
