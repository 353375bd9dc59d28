"""Answers as JSON: one object, or server-sent events while an engine samples.

The response begins with the first sampled token, so that an error before it has its status code; a later error is an
event. If the client disconnects, the answers are cancelled, which frees their places in the engine's batch.

Each API has a class of answers (`Answers`). Chat Completions and completions share chunks (`ChunkedAnswers`), with a
choice for each answer.

Answers that are recorded (`live=False`) are complete before the first event: the record of an episode must not depend
on how fast its agent reads, or when it stops.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from components.errors import EngineError, EspalierError
from components.inference.protocol import (
    CallDelta,
    ChatCompletion,
    ChatRequest,
    Increment,
    TextCompletion,
    TextRequest,
    TokenLogprobs,
)
from components.inference.token_texts import SampledTokens

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Asked = TypeVar("Asked", ChatRequest, TextRequest)
Part = TypeVar("Part", bound=Increment)
Counted = ChatCompletion | TextCompletion
Complete = TypeVar("Complete", bound=Counted)
DONE = "data: [DONE]\n\n"
"""Last event of a stream of OpenAI's."""
Event = dict[str, Any]
Head = Callable[[str], dict[str, Any]]
"""Policy version to the fields that begin each object: id, time of creation, model."""
Refuse = Callable[[Request, Exception], Awaitable[JSONResponse]]
"""Error to the response with OpenAI's error object."""


class Answers(ABC, Generic[Part, Complete]):
    """Answers to a request in the JSON of one API."""

    closing = DONE
    """Text after the last event."""

    @abstractmethod
    def whole(self, answers: Sequence[Complete]) -> Event:
        """Return the object of the complete answers."""

    @abstractmethod
    def grow(self, index: int, increment: Part) -> Iterator[Event]:
        """Yield the events of an increment of answer `index`."""

    @abstractmethod
    def end(self, answers: Sequence[Complete]) -> Iterator[Event]:
        """Yield the remaining events of the complete answers."""

    def fail(self, error: dict[str, Any]) -> Iterator[Event]:
        """Yield the last event after an error. error: OpenAI's error object."""
        yield {"error": error}


class Feed(Generic[Complete]):
    """Answers of an engine while they are sampled. complete: requests to their answers. live: report increments."""

    def __init__(
        self,
        requests: Sequence[Asked],
        complete: Callable[[Sequence[Asked]], Coroutine[Any, Any, list[Complete]]],
        *,
        live: bool,
    ):
        self._queue: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()
        if live:
            requests = [replace(request, listener=self._listener(index)) for index, request in enumerate(requests)]
        self._task = asyncio.create_task(complete(requests))
        self._task.add_done_callback(self._completed)
        self._first: tuple[int, Any] | None = None

    def _listener(self, index: int) -> Callable[[Any], None]:
        return lambda increment: self._queue.put_nowait((index, increment))

    def _completed(self, task: asyncio.Task[list[Complete]]) -> None:
        if not task.cancelled():
            task.exception()  # else asyncio logs the error of answers whose client has gone
        self._queue.put_nowait(None)

    async def begin(self) -> None:
        """Wait for the first increment, or the complete answers. Raises the error of the engine."""
        self._first = await self._queue.get()
        if self._first is None:
            self._task.result()

    async def increments(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield the increments, each with the index of its answer."""
        item = self._first
        while item is not None:
            yield item
            item = await self._queue.get()

    def answers(self) -> list[Complete]:
        """Return the complete answers after the last increment. Raises the error of the engine."""
        return self._task.result()

    def cancel(self) -> None:
        """Cancel unfinished answers."""
        self._task.cancel()


class EventStream(StreamingResponse):
    """Response with the events of a feed that has begun. The feed is cancelled with it."""

    def __init__(self, request: Request, feed: Feed[Complete], answers: Answers[Any, Complete], refuse: Refuse):
        super().__init__(
            self._messages(request, answers, refuse),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.cancel()

    async def _messages(self, request: Request, answers: Answers[Any, Any], refuse: Refuse) -> AsyncIterator[str]:
        try:
            async for index, increment in self._feed.increments():
                for event in answers.grow(index, increment):
                    yield server_sent(event)
            for event in answers.end(self._feed.answers()):
                yield server_sent(event)
        except Exception as error:
            if not isinstance(error, EspalierError):
                logger.exception("a stream failed")
            for event in answers.fail(json.loads(bytes((await refuse(request, error)).body))["error"]):
                yield server_sent(event)
        else:
            if answers.closing:
                yield answers.closing


def server_sent(event: Event) -> str:
    """Return a server-sent event, named by its `type` if it has one."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"


async def stream(
    request: Request, feed: Feed[Complete], answers: Answers[Any, Complete], refuse: Refuse
) -> EventStream:
    """Return the response after the feed has begun. Raises the engine's error if there is no first token, and
    HTTPException if the client disconnects before."""
    try:
        await unless_disconnected(request, feed.begin())
    except BaseException:
        feed.cancel()
        raise
    return EventStream(request, feed, answers, refuse)


async def unless_disconnected(request: Request, answers: Coroutine[Any, Any, Result]) -> Result:
    """Return the result. If the client disconnects, cancel it and raise HTTPException."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, disconnect = asyncio.create_task(answers), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({answering, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise HTTPException(499, "the client hung up")
        return answering.result()
    finally:
        disconnect.cancel()
        if answering.cancel():
            await asyncio.gather(answering, return_exceptions=True)


def rest_of(content: str, sent: str) -> str:
    """Return the part of a message's content that is not sent yet. Raises EngineError if the content differs from what
    is sent."""
    if not content.startswith(sent):
        raise EngineError("the tokenizer's text of the whole response differs from that of its parts")
    return content[len(sent) :]


def usage_of(prompted: Sequence[Counted], answers: Sequence[Counted]) -> dict[str, Any]:
    """Return the token counts of answers, those of reasoning among them. prompted: one answer to each prompt."""
    prompt = sum(len(answer.prompt_token_ids) for answer in prompted)
    sampled = sum(len(answer.token_ids) for answer in answers)
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    reasoning = sum(answer.reasoning_tokens for answer in answers if isinstance(answer, ChatCompletion))
    return {**usage, "completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else usage


class SentCall:
    """A call of an answer, as far as it is sent."""

    def __init__(self, delta: CallDelta):
        self.id, self.name, self.index, self.arguments = delta.id, delta.name, delta.index, ""

    def rest_of(self, calls: Sequence[dict[str, Any]]) -> str | None:
        """Return the part of the arguments that is not sent yet; None if the complete answer has no calls. Raises
        EngineError if it has another call in this place."""
        if not calls:
            return None
        call = calls[self.index] if self.index < len(calls) else None
        if call is None or (call["id"], call["function"]["name"]) != (self.id, self.name):
            raise EngineError("the name of the call in the whole response differs from that in its parts")
        return rest_of(call["function"]["arguments"], self.arguments)


class Unsent:
    """Tokens that are sampled and not sent yet, which the next delta carries."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.likeliest: list[TokenLogprobs] = []
        self._taken = 0

    def add(self, increment: Increment) -> None:
        self.token_ids = self.token_ids + increment.token_ids
        self.logprobs = self.logprobs + increment.logprobs
        self.likeliest = self.likeliest + increment.likeliest

    def rest_of(self, answer: SampledTokens) -> None:
        """Set the tokens to those of the complete answer that are not taken."""
        self.token_ids, self.logprobs = answer.token_ids[self._taken :], answer.logprobs[self._taken :]
        self.likeliest = answer.likeliest[self._taken :]

    def clear(self) -> None:
        """Forget the tokens, which are sent."""
        self._taken += len(self.token_ids)
        self.token_ids, self.logprobs, self.likeliest = [], [], []


class GrowingChoice(ABC, Generic[Part, Complete]):
    """One answer of `ChunkedAnswers`, and what of it is sent."""

    def __init__(self) -> None:
        self.begun = False
        self.sent = ""
        self.unsent = Unsent()

    @abstractmethod
    def whole(self, answer: Complete) -> dict[str, Any]:
        """Return the choice of the complete answer."""

    @abstractmethod
    def begin(self, answer: Part | Complete) -> Iterator[dict[str, Any]]:
        """Yield the choices before any text."""

    @abstractmethod
    def grow(self, increment: Part) -> Iterator[dict[str, Any]]:
        """Yield the choices of an increment, whose tokens are in `unsent`."""

    @abstractmethod
    def end(self, answer: Complete) -> Iterator[dict[str, Any]]:
        """Yield the remaining choices of the complete answer, whose remaining tokens are in `unsent`."""


class ChunkedAnswers(Answers[Part, Complete]):
    """Answers of Chat Completions and completions: an object with all choices, or chunks with a choice each, and the
    token counts if the request has `include_usage`. head: id, created and model, by policy version."""

    whole_object: str
    chunk_object: str
    """Values of `object`."""

    def __init__(self, choices: Sequence[GrowingChoice[Part, Complete]], head: Head, include_usage: bool):
        self._choices = choices
        self._head = head
        self._include_usage = include_usage

    @abstractmethod
    def usage(self, answers: Sequence[Complete]) -> dict[str, Any]:
        """Return the token counts."""

    def whole(self, answers: Sequence[Complete]) -> Event:
        choices = [choice.whole(answer) for choice, answer in zip(self._choices, answers, strict=True)]
        head = self._head(answers[0].policy)
        return {**head, "object": self.whole_object, "choices": choices, "usage": self.usage(answers)}

    def grow(self, index: int, increment: Part) -> Iterator[Event]:
        choice = self._choices[index]
        yield from self._begin(choice, increment)
        choice.unsent.add(increment)
        for part in choice.grow(increment):
            yield self.chunk(part, increment)

    def end(self, answers: Sequence[Complete]) -> Iterator[Event]:
        for choice, answer in zip(self._choices, answers, strict=True):
            yield from self._begin(choice, answer)
            choice.unsent.rest_of(answer)
            for part in choice.end(answer):
                yield self.chunk(part, answer)
        if self._include_usage:
            yield {**self._base(answers[0].policy), "choices": [], "usage": self.usage(answers)}

    def chunk(self, choice: dict[str, Any], answer: Part | Complete) -> Event:
        """Return the event of a choice."""
        return {**self._base(answer.policy), "choices": [choice]}

    def _begin(self, choice: GrowingChoice[Part, Complete], answer: Part | Complete) -> Iterator[Event]:
        if not choice.begun:
            choice.begun = True
            for part in choice.begin(answer):
                yield self.chunk(part, answer)

    def _base(self, policy: str) -> Event:
        base = {**self._head(policy), "object": self.chunk_object}
        return {**base, "usage": None} if self._include_usage else base
