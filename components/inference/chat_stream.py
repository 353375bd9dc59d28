"""Chat Completions answers as `chat.completion.chunk` objects.

For each answer: its role, deltas of its content as it is sampled, its tool calls, and its finish reason. A call begins
with its id and name; deltas of its arguments follow. Those of the first call are sent as they are sampled, except for
the last brace (`components.inference.growing_text`); the rest when the answer is complete, because only then are they
certain to be calls. If they are none, the text of the answer follows as content, and the call stays incomplete. Later
calls are not sent before the first one is complete, because OpenAI's clients end a call when the next one begins.
Log-probabilities and token ids are in the chunk after which they are sampled, or in a later one if the text is held
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from components.inference.protocol import CallDelta, ChatCompletion, Increment
from components.inference.streaming import SentCall, Unsent, rest_of
from components.inference.token_texts import Decode, logprobs_of
from components.inference.wire import ChatCompletionsRequest, openai_message, usage_of

Chunk = dict[str, Any]


class ChatChunks:
    """Chunks of the answers to one request. head: id, created and model, by policy version."""

    def __init__(self, parsed: ChatCompletionsRequest, head: Callable[[str], dict[str, Any]], decode: Decode | None):
        self._parsed = parsed
        self._head = head
        self._choices = [_Choice(index, parsed, decode) for index in range(len(parsed.requests))]

    def grow(self, index: int, increment: Increment) -> Iterator[Chunk]:
        """Yield the chunks of an increment of answer `index`."""
        for choice in self._choices[index].grow(increment):
            yield self._chunk(choice, increment.policy, increment.prompt_token_ids)

    def end(self, answers: Sequence[ChatCompletion]) -> Iterator[Chunk]:
        """Yield the remaining chunks of the complete answers, and the token counts if they are requested."""
        for choices, answer in zip(self._choices, answers, strict=True):
            for choice in choices.end(answer):
                yield self._chunk(choice, answer.policy, answer.prompt_token_ids)
        if self._parsed.include_usage:
            yield {**self._base(answers[0].policy), "choices": [], "usage": usage_of(answers)}

    def fail(self, error: dict[str, Any]) -> Iterator[Chunk]:
        """Yield OpenAI's error object."""
        yield {"error": error}

    def _base(self, policy: str) -> Chunk:
        base: Chunk = {**self._head(policy), "object": "chat.completion.chunk"}
        return {**base, "usage": None} if self._parsed.include_usage else base

    def _chunk(self, choice: dict[str, Any], policy: str, prompt: list[int]) -> Chunk:
        chunk = {**self._base(policy), "choices": [choice]}
        if self._parsed.return_token_ids and "role" in choice["delta"]:
            chunk["prompt_token_ids"] = prompt
        return chunk


class _Choice:
    """State of one answer: what is sent."""

    def __init__(self, index: int, parsed: ChatCompletionsRequest, decode: Decode | None):
        self._index = index
        self._parsed = parsed
        self._decode = decode
        self._opened = False
        self._sent = ""
        self._call: SentCall | None = None
        self._unsent = Unsent()

    def grow(self, increment: Increment) -> Iterator[dict[str, Any]]:
        yield from self._open()
        self._unsent.add(increment)
        if increment.text:
            self._sent += increment.text
            yield self._delta({"content": increment.text})
        for delta in increment.calls:
            if delta.index == 0:
                yield from map(self._delta, self._grow_call(delta))

    def _grow_call(self, delta: CallDelta) -> Iterator[dict[str, Any]]:
        if self._call is None:
            self._call = SentCall(delta)
            yield _named(0, delta.id, delta.name)
        if delta.arguments:
            self._call.arguments += delta.arguments
            yield _arguments(0, delta.arguments)

    def end(self, answer: ChatCompletion) -> Iterator[dict[str, Any]]:
        yield from self._open()
        message = openai_message(answer.message)
        calls = message.get("tool_calls") or []
        remaining = rest_of(message["content"] or "", self._sent)
        self._unsent.rest_of(answer)
        deltas: list[dict[str, Any]] = []
        if remaining or not (self._sent or calls):  # also of an empty answer, from which clients build the message
            deltas.append({"content": remaining})
        if self._call and (remaining_arguments := self._call.rest_of(calls)) is not None:
            deltas.append(_arguments(0, remaining_arguments))
        for place, call in list(enumerate(calls))[1 if self._call else 0 :]:
            function = call["function"]
            deltas += [_named(place, call["id"], function["name"]), _arguments(place, function["arguments"])]
        if not deltas and self._unsent.token_ids and (self._parsed.logprobs or self._parsed.return_token_ids):
            deltas.append({"content": ""})  # of the end-of-turn token
        yield from map(self._delta, deltas)
        yield {"index": self._index, "delta": {}, "finish_reason": answer.finish_reason}

    def _open(self) -> Iterator[dict[str, Any]]:
        if not self._opened:
            self._opened = True
            yield {"index": self._index, "delta": {"role": "assistant"}, "finish_reason": None}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return a delta with the tokens that are not sent yet."""
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "finish_reason": None, "logprobs": None}
        if self._unsent.token_ids:
            if self._parsed.logprobs:
                choice["logprobs"] = {"content": logprobs_of(self._unsent, self._decode), "refusal": None}
            if self._parsed.return_token_ids:
                choice["token_ids"] = self._unsent.token_ids
            self._unsent.clear()
        return choice


def _named(place: int, name: str, function: str) -> dict[str, Any]:
    """Return the delta that begins a call. name: its id."""
    call = {"index": place, "id": name, "type": "function", "function": {"name": function, "arguments": ""}}
    return {"tool_calls": [call]}


def _arguments(place: int, text: str) -> dict[str, Any]:
    """Return a delta of a call's arguments."""
    return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}
