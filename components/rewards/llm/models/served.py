"""Judge models with chat completions: behind a URL, or of another provider (`models.litellm`).

JSON is requested by its schema. A server that does not support this is asked for any JSON object, then in words alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

from components.errors import ContextOverflow, JudgeError, Problem, ResourceError
from components.json_client import ChatClient, RefusalCheck, empty_answer, fail_on_invalid_answer
from components.json_reply import FailedAttempt, Reply
from components.litellm_client import LiteLLMClient
from components.redaction import dereference
from components.rewards.llm.batches import BATCH_SHARE, Batches
from components.rewards.llm.judge_model import FALLBACK_FORMAT, PaidSpec, Structured
from components.rewards.llm.protocol import JudgeAnswer, Messages
from components.rewards.protocol import RewardResources
from components.rewards.spec import JudgeSpec
from components.specs.served import ModelEndpoint

UNSUPPORTED_STATUSES = (400, 404, 415, 422, 501)
"""HTTP statuses with which servers reject an unknown parameter."""


class UnsupportedFormat(Exception):
    """The server does not support this form of requesting JSON."""


class ServedJudge(ModelEndpoint, PaidSpec):
    """Server with an OpenAI-compatible chat completions API."""

    key_path: ClassVar[str] = "reward.model"

    name: Literal["served"] = "served"
    batch: bool = False
    """Use OpenAI's Batch API: questions that come together are uploaded as one file, and answered within a day, usually
    sooner, at half the price. `judge.concurrency` sets how many groups come together. Corrections, and questions that a
    batch left unanswered, are sent one by one."""

    def key(self) -> str:
        """Return the server's key. Raises ResourceError if its variable, or one that `extra` names, is not set."""
        dereference(self.extra, "reward.model.extra")
        return super().key()

    @property
    def label(self) -> str:
        return self.model

    def build(self, resources: RewardResources) -> ChatJudge:
        client = self.client(self.timeout, self.retry_for, JudgeError, wait_for=self.wait_for)
        label = f"{self.model} at {self.url}"
        batches = Batches(client, label, resources.answers, resources.waiting) if self.batch else None
        return ChatJudge(self, label, client, batches)

    def check_prerequisites(self, budget: float | None) -> None:
        self.key()

    def problems(self, settings: JudgeSpec, requests: int, unit: str) -> Iterator[Problem]:
        if self.price is None and settings.budget is not None:
            yield Problem(
                "judge.budget",
                f"{settings.budget:g} cannot be enforced: the price of {self.model} is not set; expected its price per "
                "million tokens, reward.model.price={input: 2.0, output: 8.0}, or judge.budget=null",
            )
        if not self.batch:
            return
        if settings.concurrency < requests:
            yield Problem(
                "judge.concurrency",
                f"{settings.concurrency}: limits a batch to this many {unit}, and a batch may take a day; expected at "
                f"least {requests}, so that a stage sends one batch",
            )
        limits = {"requests_per_minute": self.requests_per_minute, "tokens_per_minute": self.tokens_per_minute}
        for name, limit in limits.items():
            if limit is not None:
                yield Problem(
                    f"reward.model.{name}",
                    f"{limit:g}: does not apply to batches (reward.model.batch=true); expected null, or batch=false",
                )


class ChatJudge:
    """Judge whose client sends chat completions.

    label: description for messages. batches: what sends questions together; None sends each alone."""

    def __init__(self, spec: PaidSpec, label: str, client: ChatClient | LiteLLMClient, batches: Batches | None = None):
        self.label = label
        self.priced = spec.estimated_cost(0, 0) is not None
        self._spec = spec
        self._format = AnswerFormat(spec, spec.label)
        self._client = client
        self._batches = batches

    def price(self, read: int, written: int) -> float:
        cost = self._spec.estimated_cost(read, written)
        assert cost is not None
        return cost

    async def call(
        self, messages: Messages, schema: dict[str, Any] | None, question_digest: str, immediate: bool
    ) -> JudgeAnswer:
        async def send(request: dict[str, Any], structured: Structured) -> JudgeAnswer:
            if self._batches is not None and not immediate:
                reply = await self._batches.ask(question_digest, structured, request)
                if (answer := self._batch_answer(reply, structured)) is not None:
                    return answer
            return await self._client.complete(request, of_completion, self._error_mapper(structured))

        try:
            return await self._format.ask(messages, schema, send)
        except ContextOverflow as error:
            raise JudgeError(f"{error}; show the judge less: reward.model.longest={self._spec.longest}") from None

    def _batch_answer(self, reply: Reply | None, structured: Structured) -> JudgeAnswer | None:
        """Return the answer of a batch; None if the question must be asked again, alone. Raises UnsupportedFormat."""
        if reply is None:
            return None
        if reply.status != 200:
            if isinstance(error := self._error_mapper(structured)(reply, ""), UnsupportedFormat):
                raise error
            return None
        try:
            return replace(of_completion(reply.json()), share=BATCH_SHARE)
        except FailedAttempt:
            return None

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._client.close()

    def _error_mapper(self, structured: Structured) -> RefusalCheck:
        def mapped_error(reply: Reply, text: str) -> Exception | None:
            code, message = reply.error()
            if structured in FALLBACK_FORMAT and reply.status in UNSUPPORTED_STATUSES and about_format(message):
                return UnsupportedFormat()
            if code in ("unsupported_parameter", "unsupported_value"):
                hint = "leave it out: +reward.model.extra.max_tokens=null, or the parameter that the message names"
                return ResourceError(f"{self.label} does not support a parameter ({text}); {hint}")
            if reply.status == 404 and isinstance(self._client, ChatClient):
                return ResourceError(
                    f"{self._client.url} has no /chat/completions or no model {self._spec.label} ({text}); see "
                    "reward.model.url and reward.model.model"
                )
            return None

        return mapped_error


def about_format(message: str) -> bool:
    """Return True if an error message is about structured output."""
    return any(
        word in message.lower() for word in ("response_format", "json_schema", "json_object", "schema", "guided")
    )


class AnswerFormat:
    """Form in which one model is asked for JSON: the strictest that its server supports."""

    def __init__(self, spec: PaidSpec, model: str):
        self._spec = spec
        self._model = model
        self._structured: Structured = spec.structured

    async def ask(
        self,
        messages: Messages,
        schema: dict[str, Any] | None,
        send: Callable[[dict[str, Any], Structured], Awaitable[JudgeAnswer]],
    ) -> JudgeAnswer:
        """Return the answer of `send` to a request body; while it raises UnsupportedFormat, request the next form."""
        while True:
            structured: Structured = self._structured if schema is not None else "none"
            try:
                return await send(self._body(messages, schema, structured), structured)
            except UnsupportedFormat:
                if structured not in FALLBACK_FORMAT:
                    raise
                if self._structured == structured:
                    self._structured = FALLBACK_FORMAT[structured]

    def _body(self, messages: Messages, schema: dict[str, Any] | None, structured: Structured) -> dict[str, Any]:
        """Return the body of a request. Parameters that `extra` sets to null are left out."""
        request: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "temperature": self._spec.temperature,
            "max_tokens": self._spec.max_tokens,
        }
        if structured == "schema":
            named_schema = {"name": "judgement", "schema": schema, "strict": True}
            request["response_format"] = {"type": "json_schema", "json_schema": named_schema}
        elif structured == "object":
            request["response_format"] = {"type": "json_object"}
        extra = dereference(self._spec.extra, "reward.model.extra")
        return {name: value for name, value in (request | extra).items() if value is not None}


def of_completion(completion: dict[str, Any]) -> JudgeAnswer:
    """Return the answer in a `chat.completion` object. Raises FailedAttempt if it is none."""
    with fail_on_invalid_answer():
        choice = completion["choices"][0]
        message = choice["message"]
        usage = completion.get("usage") or {}
        answer = JudgeAnswer(
            text=_text(message.get("content")),
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cut_off=choice.get("finish_reason") == "length",
            refusal=str(message.get("refusal") or ""),
        )
    if not answer.text.strip() and not answer.refusal and not answer.cut_off:
        raise empty_answer()
    return answer


def _text(content: Any) -> str:
    """Return the text of a message's content, which some servers send in parts. Lone surrogates are replaced."""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "").encode("utf-8", "replace").decode()


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
