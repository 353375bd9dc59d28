"""Client of one judge model: answers come from the cache, or from requests within the rate limits and the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from components.rewards.llm.cache import AnswerCache, digest
from components.rewards.llm.judge_model import JudgeModelSpec
from components.rewards.llm.protocol import JudgeAnswer, Messages
from components.rewards.llm.rate_limits import TokenEstimate
from components.rewards.protocol import RewardResources

CACHED_FIELDS = ("text", "prompt_tokens", "completion_tokens", "cut_off", "refusal", "share")
"""Fields of an answer that the cache stores."""


class JudgeClient:
    """Client of one model, for one stage."""

    def __init__(self, spec: JudgeModelSpec, resources: RewardResources):
        self.spec = spec
        self._client = spec.build(resources)
        self.name = self._client.label
        self._meter = resources.meter
        self._cache = AnswerCache(resources.answers) if resources.answers is not None else None
        self._identity = [spec.key_part() | {"price": None}, getattr(self._client, "version", "")]
        self._limits = spec.rate_limits()
        self._tokens = TokenEstimate(spec.max_tokens)

    async def ask(
        self, messages: Messages, schema: dict[str, Any] | None = None, repeat: int = 0, immediate: bool = False
    ) -> JudgeAnswer:
        """Return one answer. repeat: number of the repetition; the same question with another number is asked again.
        immediate: bypass batching. Raises BudgetExceeded, JudgeError, ResourceError."""
        question_digest = digest([self._identity, messages, schema, repeat])
        if self._cache is not None and (cached := self._cache.find(question_digest)) is not None:
            self._meter.cached += 1
            return self._priced(JudgeAnswer(**cached, question_digest=question_digest))
        characters = sum(len(message["content"]) for message in messages)
        minimum_cost = self._client.price(int(self._tokens.read(characters)), 0) if self._client.priced else None
        self._meter.begin(self.name, minimum_cost)
        try:
            expected_tokens = await self._limits.wait(lambda: self._tokens.read(characters) + self._tokens.written())
            answer = self._priced(
                replace(
                    await self._client.call(messages, schema, question_digest, immediate),
                    question_digest=question_digest,
                )
            )
        except BaseException:
            self._meter.gave_up()
            raise
        prompt, completion = answer.prompt_tokens or 0, answer.completion_tokens or 0
        if answer.prompt_tokens is not None and answer.completion_tokens is not None:
            self._limits.used(expected_tokens, prompt + completion)
            self._tokens.learn(characters, prompt, completion)
        self._meter.end(answer.cost, prompt, completion)
        return answer

    def keep(self, *answers: JudgeAnswer) -> None:
        """Store valid answers in the cache; not their costs, which follow from the current price."""
        if self._cache is not None:
            self._cache.keep(
                {answer.question_digest: {name: getattr(answer, name) for name in CACHED_FIELDS} for answer in answers}
            )

    def close(self) -> None:
        self._client.close()
        if self._cache is not None:
            self._cache.close()

    def _priced(self, answer: JudgeAnswer) -> JudgeAnswer:
        read, written = answer.prompt_tokens, answer.completion_tokens
        if not self._client.priced or read is None or written is None:
            return replace(answer, cost=None)
        return replace(answer, cost=answer.share * self._client.price(read, written))
