"""Chat Completions: requests as conversations for an engine, and answers as OpenAI's JSON, whole or as stream events.

Extensions, as in vLLM: `top_k`, `min_p`, and `return_token_ids`, which adds `prompt_token_ids` and `token_ids` to the
response.

A stream has for each answer its role, deltas of its content as it is sampled, its tool calls, and its finish reason. A
call begins with its id and name; deltas of its arguments follow. Those of the first call are sent as they are sampled,
except for the last brace (`components.inference.growing_text`); the rest when the answer is complete, because only then
are they certain to be calls. If they are none, the text of the answer follows as content, and the call stays
incomplete. Later calls are not sent before the first one is complete, because OpenAI's clients end a call when the next
one begins. Log-probabilities and token ids are in the chunk after which they are sampled, or in a later one if the text
is held back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from components.errors import Problem, SpecError
from components.inference.protocol import CallDelta, ChatCompletion, ChatRequest, Increment, Sampling
from components.inference.request_bodies import (
    MAX_MESSAGES,
    ChunkedBody,
    Name,
    Neutral,
    RequestBody,
    RequestContext,
    Tokens,
    parse_parameters,
)
from components.inference.request_forms import ToolsBody, chat_offer
from components.inference.request_logits import LogitBody, logit_change
from components.inference.samples import FIELD, sample_of
from components.inference.streaming import ChunkedAnswers, GrowingChoice, Head, SentCall, rest_of, usage_of
from components.inference.token_texts import Decode, SampledTokens, logprobs_of

_NEUTRAL: Neutral = {
    "modalities": (None, ["text"]),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
}
"""Unsupported parameters, with their neutral values, which are accepted."""


class TextPart(RequestBody):
    """A text part of a message."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_media(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") in ("image_url", "input_audio", "file"):
            raise ValueError("a part of type 'text': this server reads text only")
        return data


class Function(RequestBody):
    """Name and arguments of a tool call."""

    name: Name
    arguments: str
    """Arguments as JSON text."""
    parsed_arguments: Any = None
    """Field that the npm client adds to responses and sends back; ignored."""


class FunctionCall(RequestBody):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None
    """Field that OpenAI's Python client adds to streamed calls and sends back; ignored."""


class ChatMessage(RequestBody):
    """A message of the conversation. Unused fields that clients copy from responses must be None or empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: Name | None = None
    tool_calls: list[FunctionCall] | None = Field(None, max_length=MAX_MESSAGES)
    tool_call_id: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    parsed: Any = None
    """Field that the npm client adds to responses and sends back; ignored."""
    provider_specific_fields: dict[str, Any] | None = None
    """Field that LiteLLM adds to responses and sends back; ignored."""
    reasoning_content: str | None = None
    """Reasoning of an assistant message."""
    reasoning: str | None = None
    """The same, as vLLM and OpenRouter name it."""


class ChatBody(ChunkedBody, ToolsBody, LogitBody):
    """The supported parameters."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    """Newer name of max_tokens in OpenAI's API."""
    response_format: Any = None
    logprobs: bool | None = None


@dataclass(frozen=True)
class ChatCompletionsRequest:
    """A parsed and validated request."""

    requests: list[ChatRequest]
    """Engine requests, one for each of `n` responses."""
    body: ChatBody


def read_request(body: dict[str, Any], context: RequestContext) -> ChatCompletionsRequest:
    """Return the parsed request body. Raises SpecError with every invalid or unsupported parameter."""
    chat, problems = parse_parameters(ChatBody, body, _NEUTRAL)
    messages = [
        _message(message, f"messages.{index}", context, problems) for index, message in enumerate(chat.messages)
    ]
    offer = chat_offer(chat, chat.response_format, context, problems)
    change = logit_change(chat, not context.recorded, problems)
    if chat.max_tokens and chat.max_completion_tokens and chat.max_tokens != chat.max_completion_tokens:
        problems.append(Problem("max_tokens", "differs from max_completion_tokens, which means the same; send one"))
    problems += chat.stream_problems()
    if chat.top_logprobs and not chat.logprobs:
        problems.append(Problem("top_logprobs", "is allowed with logprobs: true only"))
    if problems:
        raise SpecError(problems)
    request = ChatRequest(
        messages,
        offer.tools,
        context.policy(chat.model),
        chat.sampling(chat.max_completion_tokens or chat.max_tokens or context.default_max_tokens),
        chat.sampling_seed(),
        context.agent,
        stop=chat.stop_strings,
        form=offer.form,
        change=change,
        alternatives=chat.top_logprobs or None,
    )
    return ChatCompletionsRequest([replace(request, seed=request.seed + index) for index in range(chat.n or 1)], chat)


def _message(message: ChatMessage, path: str, context: RequestContext, problems: list[Problem]) -> dict[str, Any]:
    """Return the message in the engine's format; add its problems."""
    parts = message.content
    content = "".join(part.text for part in parts) if isinstance(parts, list) else parts
    if content is None and message.role != "assistant":
        problems.append(Problem(f"{path}.content", "is missing; only an assistant message can have none"))
    if message.tool_calls and message.role != "assistant":
        problems.append(Problem(f"{path}.tool_calls", f"a message of role '{message.role}' cannot call tools"))
    for place, call in enumerate(message.tool_calls or []):
        context.check_arguments(call.function.arguments, f"{path}.tool_calls.{place}.function.arguments", problems)
    if (message.role == "tool") != (message.tool_call_id is not None):
        problems.append(Problem(f"{path}.tool_call_id", "belongs to every message of role 'tool', and to no other"))
    result: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    if message.tool_calls:
        without: dict[str, Any] = {"function": {"parsed_arguments"}, "index": True}
        result["tool_calls"] = [call.model_dump(exclude=without) for call in message.tool_calls]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    for name in ("reasoning_content", "reasoning"):
        if (reasoning := getattr(message, name)) and message.role != "assistant":
            problems.append(
                Problem(f"{path}.{name}", f"a message of role '{message.role}' has no reasoning; leave it out")
            )
        elif reasoning:
            result.setdefault("reasoning", reasoning)
    return result


class ChatAnswers(ChunkedAnswers[Increment, ChatCompletion]):
    """Answers to one request. samples: True to add the field `sample` to each choice."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, parsed: ChatCompletionsRequest, head: Head, decode: Decode | None, *, samples: bool = False):
        choices = [
            _Choice(index, parsed.body, decode, request.sampling if samples else None)
            for index, request in enumerate(parsed.requests)
        ]
        super().__init__(choices, head, parsed.body.include_usage)
        self._shows_ids = bool(parsed.body.return_token_ids)

    def whole(self, answers: Sequence[ChatCompletion]) -> dict[str, Any]:
        body = super().whole(answers)
        return {**body, "prompt_token_ids": answers[0].prompt_token_ids} if self._shows_ids else body

    def chunk(self, choice: dict[str, Any], answer: Increment | ChatCompletion) -> dict[str, Any]:
        chunk = super().chunk(choice, answer)
        first = self._shows_ids and "role" in choice["delta"]
        return {**chunk, "prompt_token_ids": answer.prompt_token_ids} if first else chunk

    def usage(self, answers: Sequence[ChatCompletion]) -> dict[str, Any]:
        return usage_of(answers[:1], answers)


class _Choice(GrowingChoice[Increment, ChatCompletion]):
    """One answer, and what of it is sent."""

    def __init__(self, index: int, body: ChatBody, decode: Decode | None, sampling: Sampling | None):
        super().__init__()
        self._sampling = sampling
        """Parameters of the field `sample`; None: the choice does not have it."""
        self._index = index
        self._body = body
        self._decode = decode
        self._call: SentCall | None = None
        self._reasoned = ""
        """Reasoning that is sent."""

    def whole(self, answer: ChatCompletion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": self._index,
            "message": _message_body(answer),
            "finish_reason": answer.finish_reason,
            "logprobs": self._logprobs(answer) if self._body.logprobs else None,
        }
        if self._sampling is not None:
            choice[FIELD] = sample_of(answer, self._sampling)
        return {**choice, "token_ids": answer.token_ids} if self._body.return_token_ids else choice

    def begin(self, answer: Increment | ChatCompletion) -> Iterator[dict[str, Any]]:
        yield {"index": self._index, "delta": {"role": "assistant"}, "finish_reason": None}

    def grow(self, increment: Increment) -> Iterator[dict[str, Any]]:
        if increment.reasoning:
            self._reasoned += increment.reasoning
            yield self._delta({"reasoning_content": increment.reasoning})
        if increment.text:
            self.sent += increment.text
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
        calls = answer.message.get("tool_calls") or []
        remaining = rest_of(_content(answer) or "", self.sent)
        deltas: list[dict[str, Any]] = []
        if reasoning := rest_of(answer.message.get("reasoning") or "", self._reasoned):
            deltas.append({"reasoning_content": reasoning})
        if remaining or not (self.sent or calls):  # also of an empty answer, from which clients build the message
            deltas.append({"content": remaining})
        if self._call and (remaining_arguments := self._call.rest_of(calls)) is not None:
            deltas.append(_arguments(0, remaining_arguments))
        for place, call in list(enumerate(calls))[1 if self._call else 0 :]:
            function = call["function"]
            deltas += [_named(place, call["id"], function["name"]), _arguments(place, function["arguments"])]
        if not deltas and self.unsent.token_ids and (self._body.logprobs or self._body.return_token_ids):
            deltas.append({"content": ""})  # of the end-of-turn token
        yield from map(self._delta, deltas)
        yield {"index": self._index, "delta": {}, "finish_reason": answer.finish_reason}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return a delta with the tokens that are not sent yet."""
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "finish_reason": None, "logprobs": None}
        if self.unsent.token_ids:
            if self._body.logprobs:
                choice["logprobs"] = self._logprobs(self.unsent)
            if self._body.return_token_ids:
                choice["token_ids"] = self.unsent.token_ids
            self.unsent.clear()
        return choice

    def _logprobs(self, tokens: SampledTokens) -> dict[str, Any]:
        return {"content": logprobs_of(tokens, self._decode), "refusal": None}


def _content(answer: ChatCompletion) -> str | None:
    """Return the content of an answer in OpenAI's format: null if it only calls tools."""
    return answer.message.get("content") or (None if answer.message.get("tool_calls") else "")


def _message_body(answer: ChatCompletion) -> dict[str, Any]:
    """Return the message of an answer in OpenAI's format, with its reasoning as `reasoning_content`."""
    message = {**answer.message, "content": _content(answer), "refusal": None}
    reasoning = message.pop("reasoning", None)
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def _named(place: int, name: str, function: str) -> dict[str, Any]:
    """Return the delta that begins a call. name: its id."""
    call = {"index": place, "id": name, "type": "function", "function": {"name": function, "arguments": ""}}
    return {"tool_calls": [call]}


def _arguments(place: int, text: str) -> dict[str, Any]:
    """Return a delta of a call's arguments."""
    return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}
