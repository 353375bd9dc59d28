"""A Responses answer as stream events: the response, each item with its parts as they are sampled, the end.

A function call is an item when the answer is complete, because only then is it certain to be a call
(`components.inference.growing_text`). Log-probabilities are in the delta after which they are sampled, or in a later
one if the text is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from components.inference.protocol import ChatCompletion, Increment
from components.inference.responses import (
    ResponsesRequest,
    message_item,
    response_body,
    text_logprobs,
    text_part,
    unfinished_body,
)
from components.inference.streaming import Unsent, rest_of
from components.inference.token_logprobs import Decode

Event = dict[str, Any]


class ResponseEvents:
    """Events of the answer to one request.

    head: id, created_at and model, by policy version. completed: called with the answer before its last event.
    """

    def __init__(
        self,
        parsed: ResponsesRequest,
        head: Callable[[str], dict[str, Any]],
        decode: Decode | None,
        completed: Callable[[ChatCompletion], None],
    ):
        self._parsed = parsed
        self._head = head
        self._decode = decode
        self._completed = completed
        self._policy = parsed.request.policy
        self._next = 0
        self._sent: str | None = None
        """Text of the message that is sent; None before its item."""
        self._unsent = Unsent()

    def grow(self, index: int, increment: Increment) -> Iterator[Event]:
        """Yield the events of an increment."""
        yield from self._begin(increment.policy)
        self._unsent.add(increment)
        if increment.text:
            yield from self._text(increment.text)

    def end(self, answers: Sequence[ChatCompletion]) -> Iterator[Event]:
        """Yield the remaining events of the complete answer."""
        (answer,) = answers
        yield from self._begin(answer.policy)
        self._unsent.rest_of(answer)
        response = response_body(answer, self._parsed, self._head(answer.policy), self._decode)
        for index, item in enumerate(response["output"]):
            if item["type"] == "message":
                yield from self._end_message(item)
            else:
                yield from self._call(index, item)
            yield self._event("output_item.done", output_index=index, item=item)
        self._completed(answer)
        yield self._event(response["status"], response=response)

    def fail(self, error: dict[str, Any]) -> Iterator[Event]:
        """Yield the failed response."""
        reason = {"code": error["code"] or "server_error", "message": error["message"]}
        response = unfinished_body(self._parsed, self._head(self._policy))
        yield self._event("failed", response={**response, "status": "failed", "error": reason})

    def _begin(self, policy: str) -> Iterator[Event]:
        if not self._next:
            self._policy = policy
            response = unfinished_body(self._parsed, self._head(policy))
            yield self._event("created", response=response)
            yield self._event("in_progress", response=response)

    def _text(self, text: str) -> Iterator[Event]:
        """Yield a delta of the message, with the item before the first one."""
        if self._sent is None:
            self._sent = ""
            item = message_item(self._place()["item_id"], [], "in_progress")
            yield self._event("output_item.added", output_index=0, item=item)
            yield self._event("content_part.added", **self._place(), part=text_part("", []))
        self._sent += text
        logprobs = text_logprobs(self._unsent, self._parsed, self._decode)
        self._unsent.clear()
        yield self._event("output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _end_message(self, item: dict[str, Any]) -> Iterator[Event]:
        """Yield the events up to the end of the message, which is the first item."""
        (part,) = item["content"]
        remaining = rest_of(part["text"], self._sent or "")
        if remaining or self._sent is None or (self._unsent.token_ids and self._parsed.logprobs):
            yield from self._text(remaining)
        yield self._event("output_text.done", **self._place(), text=part["text"], logprobs=part["logprobs"])
        yield self._event("content_part.done", **self._place(), part=part)

    def _call(self, index: int, item: dict[str, Any]) -> Iterator[Event]:
        place = {"output_index": index, "item_id": item["id"]}
        started = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("output_item.added", output_index=index, item=started)
        yield self._event("function_call_arguments.delta", **place, delta=item["arguments"])
        named = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("function_call_arguments.done", **place, **named)

    def _place(self) -> dict[str, Any]:
        """Return the place of the message's text."""
        return {"output_index": 0, "item_id": f"msg_{self._name()}", "content_index": 0}

    def _name(self) -> str:
        """Return the response's id without its prefix, which is part of its items' ids."""
        return str(self._head(self._policy)["id"]).removeprefix("resp_")

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": f"response.{kind}", "sequence_number": self._next, **fields}
        self._next += 1
        return event
