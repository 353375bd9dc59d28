"""Exact prompt tokens of an engine's conversations.

The tokens of each response are cached together with its conversation. A conversation that continues from there has
these tokens as its prompt, plus the text that the chat template puts after them. If the template rewrites earlier
messages, the whole prompt is rendered.

A text that cannot fit the model's context is rejected by its length, because a token has a maximum number of
characters. The length is measured before any normalization by the tokenizer.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from components.errors import ContextOverflow
from components.inference.growing_text import text_before
from components.inference.protocol import ChatCompletion, ChatRequest
from components.trajectories.chat import ChatFormat

REMEMBERED_ANSWERS = 8192
"""Maximum number of responses whose tokens are cached for continuation."""
_EMPTY: tuple[Any, ...] = (None, "", [])


@dataclass(frozen=True)
class _Answer:
    """A response, with the tokens of the conversation up to its end."""

    message: dict[str, Any]
    conversation: str
    """Key of the conversation, including this response."""
    reasoning: tuple[str | None, ...]
    """Reasoning of each response of the conversation."""
    tokens: list[int]
    closed: bool | None
    """True if the tokens end with the end of such a message; None if they end with that of another kind, such as that
    of calls after an answer, so that no prompt continues them."""


class Conversations:
    """Cache of responses, and prompts of requests. Thread-safe.

    most_tokens: maximum prompt length in tokens. A text with more characters than that many of the longest token is
    rejected before tokenization.
    """

    def __init__(self, chat: ChatFormat, most_tokens: int):
        self._chat = chat
        self._most_tokens = most_tokens
        self.most_characters = most_tokens * max(map(len, chat.tokenizer.get_vocab()))
        self._lock = threading.Lock()
        self._answers: OrderedDict[Any, _Answer] = OrderedDict()
        """Each response by identity of its message; the latest response by conversation, for each agent in each episode
        and overall."""

    def prompt(self, request: ChatRequest) -> list[int]:
        """Return the tokens of the conversation, which continue those of its last cached response.

        Among responses with equal text, the one with the identical message object is continued, else the latest of the
        same agent in the same episode, else the latest. Raises ContextOverflow if the text is too long for the model
        with any tokenization, PromptRefused if it cannot be rendered.
        """
        with self._lock:
            for message in request.messages:
                if id(message) in self._answers:  # recently used: a later request may continue it
                    self._answers.move_to_end(id(message))
        messages, turn, answer = self._recalled(request)
        continued = not any(message["role"] == "assistant" for message in messages[turn + 1 :])
        if answer is not None and continued and answer.closed is not None:
            between = self._chat.continuation(messages, request.tools, turn, closed=answer.closed)
            if between is not None:
                return answer.tokens + self._encode(between)
        if self._chat.keeps_reasoning:
            return self._chat.prompt_ids(messages, request.tools)
        return self._encode(self._chat.render(messages, request.tools, generate=True))

    def _answer(self, request: ChatRequest, message: dict[str, Any], key: str) -> _Answer | None:
        with self._lock:
            answer = self._answers.get(id(message))
            if answer is None or answer.conversation != key:
                answer = self._answers.get((request.episode, request.agent, key)) or self._answers.get(key)
        return answer

    def _recalled(self, request: ChatRequest) -> tuple[list[dict[str, Any]], int, _Answer | None]:
        """Return the messages of a request, and its last cached response with its turn.

        The messages have the reasoning of this response and of those before it, which clients of OpenAI's API leave
        out: the template decides what of it a prompt has. A response with other reasoning than the client's is not that
        of the request.
        """
        messages = list(request.messages)
        keys = list(conversation_keys(messages, request.tools))
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        for turn in reversed(turns):
            answer = self._answer(request, messages[turn], keys[turn])
            if answer is None:
                continue
            pairs = list(zip(turns, answer.reasoning, strict=False))
            if any(messages[place].get("reasoning") not in (None, reasoning or "") for place, reasoning in pairs):
                continue
            for place, reasoning in pairs:
                if reasoning is not None:
                    messages[place] = messages[place] | {"reasoning": reasoning}
            return messages, turn, answer
        return messages, -1, None

    def _encode(self, text: str) -> list[int]:
        if len(text) > self.most_characters:
            raise ContextOverflow(
                f"the prompt has {len(text)} characters; {self._most_tokens} tokens, the longest prompt, are "
                f"{self.most_characters} at most"
            )
        return self._chat.encode(text)

    def completion(
        self, request: ChatRequest, prompt: list[int], sampled: list[int], logprobs: list[float], stops: frozenset[int]
    ) -> ChatCompletion:
        """Return the response of sampled tokens, and cache it. stops: tokens that end a response."""
        stopped = sampled[-1] in stops
        turn = sum(message["role"] == "assistant" for message in request.messages)
        chat = self._chat.after(prompt)
        text = chat.text_of(sampled[:-1] if stopped else sampled)
        before = text_before(text, request.stop)
        stop_string = None
        if before is not None:
            text, stop_string = before, next(stop for stop in request.stop if text.startswith(stop, len(before)))
        invalid = False
        if request.form.without_calls:
            message = chat.message_of(text)
        else:
            message = chat.parse_text(text, turn, request.tools)
            invalid = not message.get("tool_calls") and chat.attempts_call(text, request.tools)
        self.record_response(request, message, prompt + sampled)
        ended = stopped or before is not None
        reason = "length" if not ended else "tool_calls" if message.get("tool_calls") else "stop"
        reasoning = chat.reasoning_tokens(sampled) if message.get("reasoning") is not None else 0
        return ChatCompletion(
            message,
            reason,
            prompt,
            sampled,
            logprobs,
            request.policy,
            altered=request.altered,
            reasoning_tokens=reasoning,
            invalid_call=invalid,
            stop_string=stop_string,
        )

    def record_response(self, request: ChatRequest, message: dict[str, Any], tokens: list[int]) -> None:
        """Cache a response. tokens: tokens of the conversation, which end with the sampled ones."""
        key = key_of([*request.messages, message], request.tools)
        talk = [*self._recalled(request)[0], message]
        reasoning = tuple(part.get("reasoning") for part in talk if part["role"] == "assistant")
        ended = tokens[-1] == self._chat.id_of_end(message)
        closed = None if not ended and tokens[-1] in self._chat.end_ids else ended
        answer = _Answer(message, key, reasoning, tokens, closed)
        with self._lock:
            for name in (key, id(message), (request.episode, request.agent, key)):
                self._answers.pop(name, None)
                self._answers[name] = answer
            while len(self._answers) > 3 * REMEMBERED_ANSWERS:
                self._answers.popitem(last=False)


def stop_ids(declared: int | list[int] | None, chat: ChatFormat) -> frozenset[int]:
    """Return the tokens that end a response: those that a model declares, and the end-of-turn token."""
    listed = declared if isinstance(declared, list) else [declared]
    return frozenset([*(token for token in listed if token is not None), *chat.end_ids])


def key_of(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """Return the key of a conversation. Empty optional fields of messages do not affect it, nor does the form of the
    arguments of calls, nor reasoning, which clients may leave out."""
    *_, key = conversation_keys(messages, tools)
    return key


def conversation_keys(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the key of the conversation up to each message."""
    digest = sha256(json.dumps(tools, sort_keys=True).encode())
    for message in messages:
        normalized = {name: value for name, value in message.items() if name != "reasoning" and value not in _EMPTY}
        if calls := normalized.get("tool_calls"):
            normalized["tool_calls"] = [_with_value(call) for call in calls]
        digest.update(b"\n" + json.dumps(normalized, sort_keys=True).encode())
        yield digest.hexdigest()


def _with_value(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with the value of its arguments in place of their text, which clients write in a form of their own:
    `{"a":1}` for `{"a": 1.0}`."""
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    try:
        value = json.loads(function["arguments"], parse_float=_number)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": [value]}}


def _number(text: str) -> float | int:
    """Return a number, whole if it is."""
    value = float(text)
    return int(value) if value.is_integer() else value
