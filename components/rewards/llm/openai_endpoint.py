"""A judge behind a URL that speaks OpenAI's chat completions.

It is asked for JSON by its schema. A server that does not know how is asked for any JSON, then in words alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from components.errors import JudgeError, ResourceError
from components.json_client import Client, Failed, Patience, Reply
from components.redaction import dereference
from components.rewards.llm.batches import BATCH_SHARE, Batches
from components.rewards.llm.cache import digest
from components.rewards.llm.protocol import Answer, Messages
from components.rewards.llm.spec import PaidSpec, ServedJudge

log = logging.getLogger(__name__)

Structured = Literal["schema", "object", "none"]
FALLBACK_FORMAT: dict[Structured, Structured] = {"schema": "object", "object": "none"}
"""The next way of asking for JSON."""
UNSUPPORTED_STATUSES = (400, 404, 415, 422, 501)
"""Statuses with which servers refuse a parameter that they do not know."""

NO_CREDIT_CODES = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
"""Codes that come with 429, for which no waiting helps."""


class ContextTooLong(JudgeError):
    """The question is longer than the judge's context."""


class UnsupportedFormat(Exception):
    """The server does not know this way of asking for JSON."""


class OpenAIClient:
    """Raises ResourceError where the variable of the key is not set. answers: folder in which batches that were sent
    are remembered; None forgets them."""

    def __init__(self, spec: ServedJudge, answers: Path | None = None, waiting: Callable[[str], None] = log.info):
        self.who = f"{spec.model} at {spec.url}"
        self.priced = spec.price is not None
        self._spec = spec
        self._structured = spec.structured
        self._client = Client(
            spec.url,
            spec.key(),
            Patience(spec.timeout, spec.retry_for, spec.key_path),
            key_hint=f"set {spec.key_variable or 'one: reward.model.key_variable=NAME'}",
            error=JudgeError,
        )
        self._batches = Batches(self._client, self.who, answers, waiting) if spec.batch else None

    def price(self, read: int, written: int) -> float:
        assert self._spec.price is not None
        return self._spec.price.of(read, written)

    async def call(self, messages: Messages, schema: dict[str, Any] | None, asked: str, at_once: bool) -> Answer:
        while True:
            structured: Structured = self._structured if schema is not None else "none"
            sent = body(self._spec, self._spec.model, messages, schema, structured)
            try:
                if self._batches is not None and not at_once:
                    found = await self._batches.ask(digest([asked, self._spec.url, structured]), sent)
                    if (answer := self._of_batch(found, structured)) is not None:
                        return answer
                return await self._client.post("/chat/completions", sent, read, self._refused(structured))
            except UnsupportedFormat:
                if self._structured == structured:
                    self._structured = FALLBACK_FORMAT[structured]

    def _of_batch(self, reply: Reply | None, structured: Structured) -> Answer | None:
        """None: it is asked again, alone. Raises UnsupportedFormat."""
        if reply is None:
            return None
        if reply.status != 200:
            if isinstance(why := self._refused(structured)(reply, ""), UnsupportedFormat):
                raise why
            return None
        try:
            return replace(read(reply), share=BATCH_SHARE)
        except Failed:
            return None

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._client.close()

    def _refused(self, structured: Structured) -> Any:
        def refused(reply: Reply, text: str) -> Exception | None:
            code, said = reply.error()
            if code == "context_length_exceeded" or "maximum context length" in said:
                return ContextTooLong(f"{text}; show the judge less: reward.model.longest={self._spec.longest}")
            if reply.status == 402 or code in NO_CREDIT_CODES:
                return ResourceError(f"the account at {self._spec.url} has no money left ({text})")
            if structured in FALLBACK_FORMAT and reply.status in UNSUPPORTED_STATUSES and about_format(said):
                return UnsupportedFormat()
            if code in ("unsupported_parameter", "unsupported_value"):
                hint = "leave it out: +reward.model.extra.max_tokens=null, or another that it names"
                return ResourceError(f"{self.who} does not know a parameter ({text}); {hint}")
            if reply.status == 404:
                return ResourceError(
                    f"{self._spec.url} has no /chat/completions or no model {self._spec.model} ({text}); see "
                    "reward.model.url and reward.model.model"
                )
            return None

        return refused


def about_format(said: str) -> bool:
    return any(word in said.lower() for word in ("response_format", "json_schema", "json_object", "schema", "guided"))


def body(
    spec: PaidSpec, model: str, messages: Messages, schema: dict[str, Any] | None, structured: Structured
) -> dict[str, Any]:
    """A request. What `extra` sets to null is left out."""
    sent: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "temperature": spec.temperature,
        "max_tokens": spec.max_tokens,
    }
    if structured == "schema":
        wanted = {"name": "judgement", "schema": schema, "strict": True}
        sent["response_format"] = {"type": "json_schema", "json_schema": wanted}
    elif structured == "object":
        sent["response_format"] = {"type": "json_object"}
    extra = dereference(spec.extra, "reward.model.extra")
    return {name: value for name, value in (sent | extra).items() if value is not None}


def read(reply: Reply) -> Answer:
    """The answer of a `chat.completion` object. Raises Failed for what is none."""
    return of_completion(reply.json())


def of_completion(found: dict[str, Any]) -> Answer:
    try:
        choice = found["choices"][0]
        message = choice["message"]
        usage = found.get("usage") or {}
        answer = Answer(
            text=_text(message.get("content")),
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cut_off=choice.get("finish_reason") == "length",
            refusal=str(message.get("refusal") or ""),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Failed(f"an answer that is none ({type(error).__name__}: {error})", empty=True) from None
    if not answer.text.strip() and not answer.refusal and not answer.cut_off:
        raise Failed("an empty answer", empty=True)
    return answer


def _text(content: Any) -> str:
    """Of a message's content, which some servers give in parts. Half of a surrogate pair is no text."""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "").encode("utf-8", "replace").decode()


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
