"""Requests of OpenAI's Responses as conversations for an engine; `response_events` has their answers.

A conversation is a list of items: messages, function calls, and function call outputs. A response's text and its calls
are separate items, and so is its reasoning. When a client sends them back, they are merged into one assistant message,
so that the conversation continues from the sampled tokens.

Clients may send references to items of stored responses instead of the items. Item ids contain the id of their
response: `msg_NAME` is the text of `resp_NAME`, `fc_NAME_0` its first call.

Unsupported features are rejected: built-in tools, images and files, conversations stored by OpenAI, background
responses. `previous_response_id` requires a server that stores responses (`earlier`). Extensions: `seed`, `top_k`,
`min_p`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import Problem, SpecError
from components.inference.protocol import ChatRequest
from components.inference.request_bodies import (
    MAX_MESSAGES,
    Name,
    Neutral,
    RequestBody,
    RequestContext,
    ResponsesStreamOptions,
    SamplingBody,
    Tokens,
    parse_parameters,
    read_body,
)
from components.inference.request_forms import ToolsBody, responses_offer
from components.specs.wording import shortened

Messages = list[dict[str, Any]]
Earlier = Callable[[str], Messages]
"""Id of a stored response to the conversation including it. Raises SpecError for another id."""

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""

_NEUTRAL: Neutral = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "frequency_penalty": (None, 0),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "presence_penalty": (None, 0),
    "prompt": (None,),
    "reasoning": (None, {}, {"effort": None}, {"effort": None, "summary": None}),
    "service_tier": (None, "auto", "default"),
    "truncation": (None, "disabled"),
}
"""Unsupported parameters, with their neutral values, which are accepted."""


class TextBody(RequestBody):
    """`text`."""

    format: dict[str, Any] | None = None
    verbosity: None = None


class ResponseBody(SamplingBody, ToolsBody):
    """The supported parameters."""

    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    )
    instructions: str | None = None
    """System message. It is not part of the conversation stored for `previous_response_id`."""
    previous_response_id: str | None = None
    store: bool | None = None
    """Storage of the response, so that a later request can refer to it in `previous_response_id`; None means true if
    the server stores responses."""
    text: TextBody | None = None
    max_output_tokens: Tokens | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Additional output. Log-probabilities cover all sampled tokens, also of the reasoning, and belong to the text."""
    prompt_cache_key: str | None = None
    """The caller's label; it has no effect, like the following ones."""
    safety_identifier: str | None = None
    client_metadata: dict[str, Any] | None = None
    """Labels of Codex."""

    @property
    def text_format(self) -> dict[str, Any] | None:
        """The form of the text."""
        return self.text.format if self.text else None

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])


class Text(RequestBody):
    """A text part of a message. Fields that clients copy from responses are ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class ResponsesItem(RequestBody):
    """Fields common to all items."""

    id: str | None = None
    status: str | None = None


class MessageItem(ResponsesItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Text], Field(max_length=MAX_MESSAGES)]
    phase: None = None


class CallItem(ResponsesItem):
    """A function call."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    """Arguments as JSON text."""
    parsed_arguments: Any = None
    caller: None = None
    namespace: None = None


class OutputItem(ResponsesItem):
    """The output of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[Text], Field(max_length=MAX_MESSAGES)]
    name: str | None = None
    caller: None = None
    namespace: None = None


class ReasoningText(RequestBody):
    """A text part of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ResponsesItem):
    """Reasoning before the message or the calls of the same response. Its summary and encrypted content are ignored."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES)] | None = None
    encrypted_content: str | None = None


_REASONING_ONLY = {"role", "content", "reasoning"}
"""Keys of a message that is reasoning, before the text or the calls of the same response are added."""
_ITEMS: dict[str, type[ResponsesItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


@dataclass(frozen=True)
class ResponsesRequest:
    """A parsed and validated request."""

    request: ChatRequest
    conversation: Messages
    """The conversation without the instructions, which is stored with the response."""
    body: ResponseBody
    stored: bool
    """True if the server stores the response."""


def read_request(body: dict[str, Any], context: RequestContext, earlier: Earlier | None = None) -> ResponsesRequest:
    """Return the parsed request body. Raises SpecError with every invalid or unsupported parameter.

    earlier: None if the server stores no responses.
    """
    parsed, problems = parse_parameters(ResponseBody, body, _NEUTRAL)
    conversation: Messages = []
    if earlier is None and (parsed.store or parsed.previous_response_id is not None):
        name = "store" if parsed.store else "previous_response_id"
        problems.append(
            Problem(name, "this server stores no responses; leave it out and send the whole conversation as input")
        )
    elif earlier is not None and parsed.previous_response_id is not None:
        try:
            conversation += earlier(parsed.previous_response_id)
        except SpecError as error:
            problems += error.problems
    items = [{"role": "user", "content": parsed.input}] if isinstance(parsed.input, str) else parsed.input
    for index, item in enumerate(items):
        try:
            _add_item(_resolved(item, f"input.{index}", earlier), conversation, f"input.{index}", context, problems)
        except SpecError as error:
            problems += error.problems
    if not problems and all(message.keys() == _REASONING_ONLY for message in conversation):
        problems.append(Problem("input", "has reasoning items only; expected a message to answer"))
    offer = responses_offer(parsed, parsed.text_format, context, problems)
    if parsed.top_logprobs and not parsed.shows_logprobs:
        problems.append(Problem("top_logprobs", f"is allowed with include: ['{LOGPROBS}'] only"))
    if problems:
        raise SpecError(problems)
    first = [{"role": "system", "content": parsed.instructions}] if parsed.instructions else []
    request = ChatRequest(
        [*first, *conversation],
        offer.tools,
        context.policy(parsed.model),
        parsed.sampling(parsed.max_output_tokens or context.default_max_tokens),
        parsed.sampling_seed(),
        context.agent,
        form=offer.form,
        alternatives=parsed.top_logprobs or None,
    )
    return ResponsesRequest(request, conversation, parsed, earlier is not None and parsed.store is not False)


def _add_item(
    data: dict[str, Any], messages: Messages, path: str, context: RequestContext, problems: list[Problem]
) -> None:
    """Add an item to the conversation. Raises SpecError for an invalid one, and adds the problem of arguments."""
    kind = data.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        text = f"{shortened(kind)} is not supported; expected one of {', '.join(_ITEMS)}"
        raise SpecError([Problem(f"{path}.type", text)])
    for name in ("content", "output"):
        for place, part in enumerate(data[name] if kind != "reasoning" and isinstance(data.get(name), list) else []):
            if isinstance(part, dict) and part.get("type") not in ("input_text", "output_text", "text"):
                text = f"{shortened(part.get('type'))} is not supported: this server reads text only"
                raise SpecError([Problem(f"{path}.{name}.{place}.type", text)])
    match read_body(_ITEMS[kind], data, path):
        case MessageItem() as item:
            role = "system" if item.role == "developer" else item.role
            reasoning = _take_reasoning(messages) if role == "assistant" else {}
            messages.append({"role": role, "content": _text(item.content), **reasoning})
        case CallItem() as item:
            context.check_arguments(item.arguments, f"{path}.arguments", problems)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":  # text and calls of one response are one message
                last = messages.pop()
                messages.append({**last, "tool_calls": [*last.get("tool_calls", []), call]})
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        case ReasoningItem() as item if item.content:
            text = "".join(part.text for part in item.content)
            messages.append({"role": "assistant", "content": "", "reasoning": text})
        case OutputItem() as item:
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _take_reasoning(messages: Messages) -> dict[str, Any]:
    """Remove the last message if it is reasoning alone; return its reasoning as a field of a message."""
    if not messages or messages[-1].keys() != _REASONING_ONLY or messages[-1]["content"]:
        return {}
    return {"reasoning": messages.pop()["reasoning"]}


def _text(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


_ID = re.compile(r"(?:msg|rs)_(?P<text>\w+)|fc_(?P<call>\w+)_(?P<index>\d{1,4})")


class ItemReference(RequestBody):
    """A reference to an item of a response that the server stored."""

    type: Literal["item_reference"]
    id: str


def _resolved(item: dict[str, Any], path: str, earlier: Earlier | None) -> dict[str, Any]:
    """Return an item, or the stored item that it refers to. Raises SpecError without one."""
    if item.get("type") != "item_reference":
        return item
    name = read_body(ItemReference, item, path).id
    if earlier is None:
        raise SpecError([Problem(f"{path}.type", "this server stores no responses; send the item itself")])
    if (stored := _stored_item(name, earlier)) is None:
        text = f"{shortened(name)}: no stored response has this item; send the item itself"
        raise SpecError([Problem(f"{path}.id", text)])
    return stored


def _stored_item(name: str, earlier: Earlier) -> dict[str, Any] | None:
    """Return an item by its id; None if there is none."""
    match = _ID.fullmatch(name)
    if match is None:
        return None
    try:
        message = earlier(f"resp_{match['text'] or match['call']}")[-1]
    except SpecError:
        return None
    if name.startswith("rs_"):
        parts = [{"type": "reasoning_text", "text": message.get("reasoning")}]
        return {"type": "reasoning", "content": parts} if message.get("reasoning") else None
    if match["text"]:
        return {"type": "message", "role": "assistant", "content": message.get("content") or ""}
    calls = message.get("tool_calls") or []
    index = int(match["index"])
    if index >= len(calls):
        return None
    call = calls[index]
    return {"type": "function_call", "call_id": call["id"], **call["function"]}
