"""Streamed completions of a vLLM server: tokens with their log-probabilities as they are sampled.

The client reads server-sent events in its own thread; increments are reported in the event loop of the request. The
last event, with the finish reason, is not reported: its tokens come with the response, as from the embedded engine. A
request that fails before its first increment is retried; one that fails later is an error, because another attempt may
sample other tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import orjson

from components.chat_client import fail_on_invalid_answer
from components.errors import ResourceError, StalePolicy
from components.inference.growing_text import GrowingText, growing_response
from components.inference.protocol import ChatRequest, Increment
from components.json_client import MAX_QUOTED, FailedAttempt
from components.trajectories.chat import ChatFormat

logger = logging.getLogger(__name__)


class Increments:
    """Increments of one response for the listener of its request. To be created in the event loop of the request.

    prompt: tokens of the prompt.
    """

    def __init__(self, request: ChatRequest, prompt: list[int], chat: ChatFormat):
        self.begun = False
        self._request = request
        self._prompt = prompt
        self._loop = asyncio.get_running_loop()
        self._growing: GrowingText | None = growing_response(chat, request)

    def add(self, tokens: list[int], logprobs: list[float]) -> None:
        """Report sampled tokens, from any thread."""
        self.begun = True
        self._loop.call_soon_threadsafe(self._report, tokens, logprobs)

    def close(self) -> None:
        """Report nothing any more."""
        self._growing = None

    def _report(self, tokens: list[int], logprobs: list[float]) -> None:
        if self._growing is None or self._request.listener is None:
            return
        try:
            text = self._growing.extend(tokens)
        except Exception:
            logger.exception("a response cannot be streamed; it is sent when it is complete")
            self.close()
            return
        increment = Increment(text, tokens, logprobs, self._prompt, self._request.policy, calls=self._growing.calls)
        self._request.listener(increment)


class StreamedCompletion:
    """Reader of one streamed completion (`components.json_client.StreamedBody`). model: served name that was asked.
    policy: version, for messages."""

    def __init__(self, increments: Increments, model: str, policy: str):
        self._increments = increments
        self._model = model
        self._policy = policy

    @property
    def begun(self) -> bool:
        return self._increments.begun

    async def consume(self, chunks: AsyncIterator[bytes]) -> tuple[int, bytes]:
        """Return the completion as a response without streaming has it. Raises StalePolicy, ResourceError as
        `completion_tokens`, and FailedAttempt for a stream that ends early."""
        tokens: list[int] = []
        logprobs: list[float] = []
        finished = False
        async for event in events(chunks):
            if "error" in event:
                return _status_of(event), orjson.dumps(event)
            if not event.get("choices"):
                continue
            new, new_logprobs = completion_tokens(event, self._model, self._policy)
            tokens += new
            logprobs += new_logprobs
            finished = finished or event["choices"][0].get("finish_reason") is not None
            if new and not finished:
                self._increments.add(new, new_logprobs)
        if not finished:
            raise FailedAttempt("the stream ended before the response")
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
        return 200, orjson.dumps({"model": self._model, "choices": [choice]})


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of server-sent events. Raises FailedAttempt for data that are no JSON object."""
    parts: list[bytes] = []
    async for chunk in chunks:
        parts.append(chunk)
        if b"\n" not in chunk:
            continue
        *lines, unfinished = b"".join(parts).split(b"\n")
        parts = [unfinished]
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            try:
                event = orjson.loads(data)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise FailedAttempt(f"an event of the stream is no JSON object: {data[:MAX_QUOTED]!r}", empty=True)
            yield event


def completion_tokens(answer: dict[str, Any], model: str, policy: str) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probabilities of a completion or of an event. Raises FailedAttempt for an invalid one,
    StalePolicy for one of another model, ResourceError for one without token ids."""
    with fail_on_invalid_answer():
        answered, choice = str(answer["model"]), answer["choices"][0]
        sampled, logprob_data = choice.get("token_ids"), choice.get("logprobs")
        if sampled is None or (logprob_data is None and sampled):
            raise ResourceError("a server answers without token ids and log-probabilities; expected vLLM")
        logprobs = [float(logprob) for logprob in (logprob_data or {"token_logprobs": []})["token_logprobs"]]
        tokens = [int(token) for token in sampled]
    if answered != model:
        raise StalePolicy(f"asked for policy {policy} ({model}), and {answered} answered")
    if len(tokens) != len(logprobs):
        raise FailedAttempt(f"{len(tokens)} tokens and {len(logprobs)} log-probabilities", empty=True)
    return tokens, logprobs


def _status_of(event: dict[str, Any]) -> int:
    """Return the HTTP status of an event with an error."""
    code = event["error"].get("code") if isinstance(event["error"], dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500
