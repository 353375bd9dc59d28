"""Answers of Responses: the `response` object, or stream events: the response, each item with its parts as they are
sampled, the end.

Items are numbered in the order in which they begin: reasoning first; the message and the function calls grow at once. A
tagged call begins when its name is sampled, and ends with the answer (`components.inference.growing_text`); those of
other forms are sent when they have ended, or with the complete answer if only then are they certain to be calls. If
they are none, those that have begun end as incomplete, and are no part of the response. Log-probabilities are in the
delta after which they are sampled, or in a later one if the text is held back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from components.inference.protocol import CallDelta, ChatCompletion, Increment
from components.inference.responses import ResponsesRequest
from components.inference.streaming import Answers, Event, Head, SentCall, Unsent, rest_of
from components.inference.token_texts import Decode, SampledTokens, logprobs_of

_UNSET = {"description": None, "parameters": None, "strict": None}
"""Fields that each tool of a response has."""


class ResponseAnswers(Answers[Increment, ChatCompletion]):
    """The answer to one request. head: id, created_at and model, by policy version. completed: called with the complete
    answer before it is sent."""

    def __init__(
        self,
        parsed: ResponsesRequest,
        head: Head,
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
        self._reasoned: str | None = None
        """Reasoning that is sent; None before its item."""
        self._calls: dict[str, SentCall] = {}
        """Calls that have begun, by the id of their item."""
        self._places: dict[str, int] = {}
        """Number of each item that has begun, by its id."""
        self._unsent = Unsent()
        self._ends = {
            "reasoning": self._end_reasoning,
            "message": self._end_message,
            "function_call": self._end_call,
        }

    def whole(self, answers: Sequence[ChatCompletion]) -> Event:
        """Return the `response` object."""
        (answer,) = answers
        self._completed(answer)
        return _response_body(answer, self._parsed, self._head(answer.policy), self._decode)

    def grow(self, index: int, increment: Increment) -> Iterator[Event]:
        """Yield the events of an increment."""
        yield from self._begin(increment.policy)
        self._unsent.add(increment)
        if increment.reasoning:
            yield from self._reasoning(increment.reasoning)
        if increment.text:
            yield from self._text(increment.text)
        for delta in increment.calls:
            yield from self._grow_call(delta)

    def end(self, answers: Sequence[ChatCompletion]) -> Iterator[Event]:
        """Yield the remaining events of the complete answer."""
        (answer,) = answers
        yield from self._begin(answer.policy)
        self._unsent.rest_of(answer)
        response = _response_body(answer, self._parsed, self._head(answer.policy), self._decode)
        calls = answer.message.get("tool_calls") or []
        for sent in self._calls.values():
            if sent.rest_of(calls) is None:
                item = _call_item(self._name(), sent.index, sent.id, vars(sent), "incomplete")
                yield self._event("output_item.done", output_index=self._places[item["id"]], item=item)
        for item in response["output"]:
            yield from self._ends[item["type"]](item)
            yield self._event("output_item.done", output_index=self._places[item["id"]], item=item)
        response["output"].sort(key=lambda item: self._places[item["id"]])
        self._completed(answer)
        yield self._event(response["status"], response=response)

    def fail(self, error: dict[str, Any]) -> Iterator[Event]:
        """Yield the failed response."""
        reason = {"code": error["code"] or "server_error", "message": error["message"]}
        response = _unfinished_body(self._parsed, self._head(self._policy))
        yield self._event("failed", response={**response, "status": "failed", "error": reason})

    def _begin(self, policy: str) -> Iterator[Event]:
        if not self._next:
            self._policy = policy
            response = _unfinished_body(self._parsed, self._head(policy))
            yield self._event("created", response=response)
            yield self._event("in_progress", response=response)

    def _reasoning(self, text: str) -> Iterator[Event]:
        """Yield a delta of the reasoning, with the item before the first one."""
        if self._reasoned is None:
            self._reasoned = ""
            yield self._add(_reasoning_item(f"rs_{self._name()}", [], "in_progress"))
            yield self._event("content_part.added", **self._place("rs"), part=_reasoning_part(""))
        self._reasoned += text
        yield self._event("reasoning_text.delta", **self._place("rs"), delta=text)

    def _end_reasoning(self, item: dict[str, Any]) -> Iterator[Event]:
        """Yield the events up to the end of the reasoning."""
        (part,) = item["content"]
        if (remaining := rest_of(part["text"], self._reasoned or "")) or self._reasoned is None:
            yield from self._reasoning(remaining)
        yield self._event("reasoning_text.done", **self._place("rs"), text=part["text"])
        yield self._event("content_part.done", **self._place("rs"), part=part)

    def _text(self, text: str) -> Iterator[Event]:
        """Yield a delta of the message, with the item before the first one."""
        if self._sent is None:
            self._sent = ""
            yield self._add(_message_item(f"msg_{self._name()}", [], "in_progress"))
            yield self._event("content_part.added", **self._place(), part=_text_part("", []))
        self._sent += text
        logprobs = _text_logprobs(self._unsent, self._parsed, self._decode)
        self._unsent.clear()
        yield self._event("output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _end_message(self, item: dict[str, Any]) -> Iterator[Event]:
        """Yield the events up to the end of the message."""
        (part,) = item["content"]
        remaining = rest_of(part["text"], self._sent or "")
        if remaining or self._sent is None or (self._unsent.token_ids and self._parsed.body.shows_logprobs):
            yield from self._text(remaining)
        yield self._event("output_text.done", **self._place(), text=part["text"], logprobs=part["logprobs"])
        yield self._event("content_part.done", **self._place(), part=part)

    def _grow_call(self, delta: CallDelta) -> Iterator[Event]:
        """Yield a delta of a call, with the item before the first one."""
        item = _call_item(self._name(), delta.index, delta.id, {"name": delta.name, "arguments": ""}, "in_progress")
        if item["id"] not in self._calls:
            self._calls[item["id"]] = SentCall(delta)
            yield self._add(item)
        if delta.arguments:
            self._calls[item["id"]].arguments += delta.arguments
            place = {"output_index": self._places[item["id"]], "item_id": item["id"]}
            yield self._event("function_call_arguments.delta", **place, delta=delta.arguments)

    def _end_call(self, item: dict[str, Any]) -> Iterator[Event]:
        """Yield the events up to the end of a call."""
        remaining = item["arguments"]
        if sent := self._calls.get(item["id"]):
            remaining = rest_of(remaining, sent.arguments)
        else:
            yield self._add({**item, "status": "in_progress", "arguments": ""})
        place = {"output_index": self._places[item["id"]], "item_id": item["id"]}
        yield self._event("function_call_arguments.delta", **place, delta=remaining)
        named = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("function_call_arguments.done", **place, **named)

    def _add(self, item: dict[str, Any]) -> Event:
        """Return the event that begins an item."""
        place = self._places.setdefault(item["id"], len(self._places))
        return self._event("output_item.added", output_index=place, item=item)

    def _place(self, kind: str = "msg") -> dict[str, Any]:
        """Return the place of the text of the message (`msg`) or of the reasoning (`rs`)."""
        name = f"{kind}_{self._name()}"
        return {"output_index": self._places[name], "item_id": name, "content_index": 0}

    def _name(self) -> str:
        """Return the response's id without its prefix, which is part of its items' ids."""
        return str(self._head(self._policy)["id"]).removeprefix("resp_")

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": f"response.{kind}", "sequence_number": self._next, **fields}
        self._next += 1
        return event


def _response_body(
    answer: ChatCompletion, parsed: ResponsesRequest, head: dict[str, Any], decode: Decode | None
) -> dict[str, Any]:
    """Return the `response` object. head: id, created_at, model. It is completed now."""
    cut = answer.finish_reason == "length"
    prompt, sampled = len(answer.prompt_token_ids), len(answer.token_ids)
    return {
        **_unfinished_body(parsed, head),
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer, parsed, head["id"], decode),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": prompt + sampled,
        },
    }


def _unfinished_body(parsed: ResponsesRequest, head: dict[str, Any]) -> dict[str, Any]:
    """Return the `response` object before its completion."""
    body = parsed.body
    return {
        **head,
        "object": "response",
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "temperature": parsed.request.sampling.temperature,
        "top_p": parsed.request.sampling.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "reasoning": {"effort": None, "summary": None},
        "tools": [{**_UNSET, **tool} for tool in body.tools or []],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": body.text_format or {"type": "text"}},
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "store": parsed.stored,
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def _output(answer: ChatCompletion, parsed: ResponsesRequest, name: str, decode: Decode | None) -> list[dict[str, Any]]:
    """Return the items of a response: its reasoning, its text, and each of its calls."""
    name = name.removeprefix("resp_")
    text, calls = answer.message.get("content") or "", answer.message.get("tool_calls") or []
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reasoning := answer.message.get("reasoning"):
        items.append(_reasoning_item(f"rs_{name}", [_reasoning_part(reasoning)], status))
    if text or not calls:
        part = _text_part(text, _text_logprobs(answer, parsed, decode))
        items.append(_message_item(f"msg_{name}", [part], status))
    return items + [_call_item(name, index, call["id"], call["function"], status) for index, call in enumerate(calls)]


def _call_item(name: str, index: int, call_id: str, function: dict[str, Any], status: str) -> dict[str, Any]:
    """Return the item of a function call. name: the response's id without its prefix. index: number of the call."""
    named = {"name": function["name"], "arguments": function["arguments"]}
    return {"type": "function_call", "id": f"fc_{name}_{index}", "call_id": call_id, **named, "status": status}


def _message_item(name: str, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """Return the item of an assistant message. name: its id."""
    return {"type": "message", "id": name, "role": "assistant", "status": status, "content": parts}


def _reasoning_item(name: str, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """Return the item of the reasoning. name: its id."""
    return {"type": "reasoning", "id": name, "summary": [], "content": parts, "status": status}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the text of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _text_logprobs(tokens: SampledTokens, parsed: ResponsesRequest, decode: Decode | None) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens, if they are requested."""
    if not parsed.body.shows_logprobs:
        return []
    return [
        {**_with_bytes(entry), "top_logprobs": [_with_bytes(other) for other in entry["top_logprobs"]]}
        for entry in logprobs_of(tokens, decode)
    ]


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "bytes": entry["bytes"] or []}
