"""Conversion between OpenAI's chat completions JSON and the engine protocol.

Every parameter of a request is either supported or rejected with its name and reason; none is ignored. Unsupported
parameters are accepted at their neutral value (`service_tier: "auto"`), because clients send such values by default.
The size of a request is limited, and so are the sampler's parameters. Extensions, as in vLLM: `top_k`, `min_p`, and
`return_token_ids`, which adds `prompt_token_ids` and `token_ids` to the response.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from components.errors import Problem, SpecError
from components.inference import request_forms
from components.inference.protocol import ChatCompletion, ChatRequest, Sampling
from components.inference.request_bodies import LONGEST_NAME, Neutral, RequestBody, StreamOptions, parse_parameters
from components.inference.request_forms import MAX_TOOLS, chat_tool, is_strict
from components.inference.token_texts import Decode, logprobs_of
from components.strict_json import parse

MAX_MESSAGES = 4096
"""Maximum number of messages per conversation, parts per message, and calls per message."""
MAX_ALTERNATIVES = 20
"""Maximum number of most likely tokens to return for each token."""
MAX_STOPS = 16
"""Maximum number of stop strings per request."""
MAX_NUMBER = 2**31 - 1
"""Maximum value of a token count."""
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-3, 100.0
"""Range of temperatures above 0. Logits divided by much smaller values overflow."""
LOWEST_TOP_P = 1e-9
"""Minimum of top_p. Much smaller values underflow to 0, which excludes all tokens."""


def _usable(temperature: float) -> float:
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"0 for greedy answers, or at least {LOWEST_TEMPERATURE:g}")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=HIGHEST_TEMPERATURE), AfterValidator(_usable)]
TopP = Annotated[float, Field(ge=LOWEST_TOP_P, le=1)]
TopK = Annotated[int, Field(ge=-1, le=MAX_NUMBER)]
"""0 and -1 mean no limit."""
MinP = Annotated[float, Field(ge=0, le=1)]
Tokens = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]

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


class SamplingBody(RequestBody):
    """Parameters that Chat Completions and Responses share."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    """Sampling seed; None uses a random seed per request."""

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the parameters for the engine, with the defaults of the API."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            max_tokens=max_tokens,
        )

    def sampling_seed(self) -> int:
        """Return the seed; a random one without."""
        return secrets.randbits(31) if self.seed is None else self.seed


class ChatBody(SamplingBody):
    """The supported parameters."""

    model: Name
    """Model name: `name`, or `name@version` to require that policy version."""
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    """Newer name of max_tokens in OpenAI's API."""
    n: int | None = Field(None, ge=1, le=128)
    """Number of responses to the conversation; response i uses seed + i."""
    parallel_tool_calls: bool | None = None
    """False holds a response to one call at most."""
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    """Strings that end a response."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES, strict=True)
    """Number of most likely tokens with each of `logprobs`."""
    return_token_ids: bool | None = None
    user: str | None = None
    """The caller's label; it has no effect, like `metadata`."""
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class ChatCompletionsRequest:
    """A parsed and validated request."""

    requests: list[ChatRequest]
    """Engine requests, one for each of `n` responses."""
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool


def read_request(
    body: dict[str, Any],
    policy: Callable[[str], str],
    default_max_tokens: int,
    *,
    recorded: bool = False,
    sampled_arguments: Collection[str] = (),
) -> ChatCompletionsRequest:
    """Return the parsed request body. Raises SpecError with every invalid or unsupported parameter.

    policy: returns the version of a model name. recorded: the server records responses for training; `strict` of tools
    then has no effect, so that calls are the policy's own, and logits cannot be changed. sampled_arguments: call
    arguments that the model wrote, which are accepted even if they are invalid JSON.
    """
    chat, problems = parse_parameters(
        ChatBody, body, _NEUTRAL, (*request_forms.CHAT_FIELDS, *request_forms.LOGIT_FIELDS)
    )
    messages = [
        _message(message, f"messages.{index}", sampled_arguments, problems)
        for index, message in enumerate(chat.messages)
    ]
    tools = [chat_tool(tool, f"tools.{index}", problems) for index, tool in enumerate(chat.tools or [])]
    strict = not recorded and any(is_strict(tool) for tool in chat.tools or [])
    form = request_forms.chat_form(body, tools, strict, problems)
    if chat.parallel_tool_calls is False and tools:
        form = request_forms.with_single_call(form, not recorded, problems)
    change = request_forms.logit_change(body, not recorded, problems)
    if chat.max_tokens and chat.max_completion_tokens and chat.max_tokens != chat.max_completion_tokens:
        problems.append(Problem("max_tokens", "differs from max_completion_tokens, which means the same; send one"))
    if chat.stream_options and not chat.stream:
        problems.append(Problem("stream_options", "is allowed with stream: true only"))
    if chat.top_logprobs and not chat.logprobs:
        problems.append(Problem("top_logprobs", "is allowed with logprobs: true only"))
    if problems:
        raise SpecError(problems)
    sampling = chat.sampling(chat.max_completion_tokens or chat.max_tokens or default_max_tokens)
    version, seed = policy(chat.model), chat.sampling_seed()
    stop = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    offered = [] if form.calls == () else tools
    request = ChatRequest(
        messages,
        offered,
        version,
        sampling,
        seed,
        stop=stop,
        form=form,
        change=change,
        alternatives=chat.top_logprobs or None,
    )
    return ChatCompletionsRequest(
        requests=[replace(request, seed=seed + index) for index in range(chat.n or 1)],
        stream=bool(chat.stream),
        include_usage=bool(chat.stream_options and chat.stream_options.include_usage),
        logprobs=bool(chat.logprobs),
        return_token_ids=bool(chat.return_token_ids),
    )


def completion_body(
    answers: Sequence[ChatCompletion], parsed: ChatCompletionsRequest, head: dict[str, Any], decode: Decode | None
) -> dict[str, Any]:
    """Return the `chat.completion` object. head: id, created, model."""
    choices = []
    for index, answer in enumerate(answers):
        choice: dict[str, Any] = {
            "index": index,
            "message": openai_message(answer.message),
            "finish_reason": answer.finish_reason,
            "logprobs": _logprobs(answer, decode) if parsed.logprobs else None,
        }
        if parsed.return_token_ids:
            choice["token_ids"] = answer.token_ids
        choices.append(choice)
    body = {**head, "object": "chat.completion", "choices": choices, "usage": usage_of(answers)}
    if parsed.return_token_ids:
        body["prompt_token_ids"] = answers[0].prompt_token_ids
    return body


def _message(
    message: ChatMessage, path: str, sampled_arguments: Collection[str], problems: list[Problem]
) -> dict[str, Any]:
    """Return the message in the engine's format; add its problems."""
    parts = message.content
    content = "".join(part.text for part in parts) if isinstance(parts, list) else parts
    if content is None and message.role != "assistant":
        problems.append(Problem(f"{path}.content", "is missing; only an assistant message can have none"))
    if message.tool_calls and message.role != "assistant":
        problems.append(Problem(f"{path}.tool_calls", f"a message of role '{message.role}' cannot call tools"))
    for place, call in enumerate(message.tool_calls or []):
        check_arguments(
            call.function.arguments, f"{path}.tool_calls.{place}.function.arguments", sampled_arguments, problems
        )
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
    return result


def check_arguments(text: str, path: str, sampled_arguments: Collection[str], problems: list[Problem]) -> None:
    """Add a problem if the arguments of a call are no JSON object and were not written by the model."""
    try:
        readable = isinstance(parse(text.encode()), dict)
    except ValueError:
        readable = False
    if not readable and text not in sampled_arguments:
        problems.append(Problem(path, f"expected the text of a JSON object, got {text!r:.200}"))


def openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant message in OpenAI's format, with null content if it only calls tools."""
    content = message.get("content") or (None if message.get("tool_calls") else "")
    return {**message, "content": content, "refusal": None}


def _logprobs(answer: ChatCompletion, decode: Decode | None) -> dict[str, Any]:
    return {"content": logprobs_of(answer, decode), "refusal": None}


def usage_of(answers: Sequence[ChatCompletion]) -> dict[str, int]:
    """Return the token counts of the responses to one request."""
    prompt, sampled = len(answers[0].prompt_token_ids), sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
