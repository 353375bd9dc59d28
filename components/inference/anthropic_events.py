"""Answers of Anthropic's Messages: the `message` object, or stream events: the message, each block as it is sampled,
the end.

Blocks follow each other: thinking, text, calls. A call is sent when the answer is complete, because only then is it
certain to be one, and a client would keep a block that has begun.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from components.errors import EngineError
from components.inference.protocol import ChatCompletion, Increment
from components.inference.streaming import Answers, Event, Head, rest_of, usage_of

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""Stop reasons, by the finish reason of an engine; others are `end_turn`, or `stop_sequence`."""
_FIELDS = {"thinking": {"signature": ""}, "text": {}}
"""Kinds of blocks that grow, with the other fields of each."""


class MessageAnswers(Answers[Increment, ChatCompletion]):
    """The answer to one request. head: id and model, by policy version."""

    closing = ""

    def __init__(self, head: Head):
        self._head = head
        self._begun = False
        self._sent = dict.fromkeys(_FIELDS, "")
        """Text of each kind of block that is sent."""
        self._kind: str | None = None
        """Kind of the block that grows; None before the first one."""
        self._index = -1
        """Number of the last block that has begun."""

    def whole(self, answers: Sequence[ChatCompletion]) -> Event:
        """Return the `message` object."""
        (answer,) = answers
        return {**self._body(answer), "content": _blocks(answer), **_stop(answer), "usage": _usage(answer)}

    def grow(self, index: int, increment: Increment) -> Iterator[Event]:
        """Yield the events of an increment."""
        yield from self._begin(increment)
        for kind, text in (("thinking", increment.reasoning), ("text", increment.text)):
            if text:
                yield from self._grow(kind, text)

    def end(self, answers: Sequence[ChatCompletion]) -> Iterator[Event]:
        """Yield the remaining events of the complete answer."""
        (answer,) = answers
        yield from self._begin(answer)
        for block in _blocks(answer):
            kind = block["type"]
            if kind == "tool_use":
                yield from self._start({**block, "input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
            elif (unsent := rest_of(block[kind], self._sent[kind])) or not self._sent[kind]:
                yield from self._grow(kind, unsent)
        yield from self._stop_block()
        yield {"type": "message_delta", "delta": _stop(answer), "usage": _usage(answer)}
        yield {"type": "message_stop"}

    def fail(self, error: dict[str, Any]) -> Iterator[Event]:
        """Yield the error."""
        yield {"type": "error", "error": error}

    def _begin(self, answer: Increment | ChatCompletion) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            usage = {"input_tokens": len(answer.prompt_token_ids), "output_tokens": 0}
            unfinished: Event = {**self._body(answer), "content": [], "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": {**unfinished, "usage": usage}}
            yield {"type": "ping"}

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        """Yield a delta of a block, with its start before the first one."""
        if self._kind != kind:
            yield from self._start({"type": kind, kind: "", **_FIELDS[kind]})
        self._sent[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _start(self, block: dict[str, Any]) -> Iterator[Event]:
        """Yield the end of the last block, and the start of another one."""
        yield from self._stop_block()
        self._kind = block["type"]
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop_block(self) -> Iterator[Event]:
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._index}

    def _body(self, answer: Increment | ChatCompletion) -> dict[str, Any]:
        """Return the fields of the message that are known before its content."""
        head = self._head(answer.policy)
        return {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"]}


def _blocks(answer: ChatCompletion) -> list[dict[str, Any]]:
    """Return the blocks of an answer. Raises EngineError for arguments of a call that are no JSON object, which this
    API cannot express."""
    text, calls = answer.message.get("content") or "", answer.message.get("tool_calls") or []
    blocks: list[dict[str, Any]] = []
    if reasoning := answer.message.get("reasoning"):
        blocks.append({"type": "thinking", "thinking": reasoning, **_FIELDS["thinking"]})
    if text or not calls:
        blocks.append({"type": "text", "text": text})
    for call in calls:
        try:
            value = json.loads(call["function"]["arguments"])
        except ValueError:
            value = None
        if not isinstance(value, dict):
            wrong = f"{call['function']['arguments']!r:.200}"
            raise EngineError(f"the model called {call['function']['name']} with {wrong}, expected a JSON object")
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value})
    return blocks


def _stop(answer: ChatCompletion) -> dict[str, Any]:
    """Return why an answer ended."""
    stopped = answer.stop_string is not None and answer.finish_reason == "stop"
    reason = "stop_sequence" if stopped else _STOP_REASONS.get(answer.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": answer.stop_string if stopped else None}


def _usage(answer: ChatCompletion) -> dict[str, int]:
    """Return the token counts."""
    usage = usage_of([answer], [answer])
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": usage["prompt_tokens"], **cache, "output_tokens": usage["completion_tokens"]}
