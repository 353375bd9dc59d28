"""Conversion between OpenAI's Responses JSON and the engine protocol; `wire` does the same for Chat Completions.

A conversation is a list of items: messages, function calls, and function call outputs. A response's text and its calls
are separate items. When a client sends them back, they are merged into one assistant message, so that the conversation
continues from the sampled tokens. Reasoning items are discarded, because the models here write none.

As in `wire`, a parameter is supported, accepted at its neutral value, or rejected with its name and reason. Unsupported
features are rejected too: built-in tools, images and files, conversations stored by OpenAI, background responses.
`previous_response_id` requires a server that stores responses (`earlier`). Extensions: `seed`, `top_k`, `min_p`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import Problem, SpecError
from components.inference import request_forms
from components.inference.protocol import ChatCompletion, ChatRequest
from components.inference.request_bodies import Neutral, ResponsesStreamOptions, parse_parameters
from components.inference.request_forms import MAX_TOOLS, responses_tool
from components.inference.response_items import Messages, add_item, resolve
from components.inference.token_texts import Decode, SampledTokens, logprobs_of
from components.inference.wire import (
    MAX_ALTERNATIVES,
    MAX_MESSAGES,
    Name,
    SamplingBody,
    Tokens,
)

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

_TEXT = {"type": "text"}
LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""


class ResponseBody(SamplingBody):
    """The supported parameters."""

    model: Name
    """Model name: `name`, or `name@version` to require that policy version."""
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
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    parallel_tool_calls: bool | None = None
    """False holds a response to one call at most."""
    max_output_tokens: Tokens | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Additional output. Log-probabilities cover all sampled tokens and belong to the text; there is no reasoning."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES, strict=True)
    """Number of most likely tokens with each of the log-probabilities."""
    metadata: dict[str, Any] | None = None
    """The caller's labels; they have no effect, like the following fields."""
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


@dataclass(frozen=True)
class ResponsesRequest:
    """A parsed and validated request."""

    request: ChatRequest
    conversation: Messages
    """The conversation without the instructions, which is stored with the response."""
    body: ResponseBody
    tools: list[dict[str, Any]]
    """Tools as in the request."""
    stored: bool
    """True if the server stores the response."""
    tool_choice: Any
    text_format: Any
    """As in the request."""

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.body.include or [])


def read_request(
    body: dict[str, Any],
    policy: Callable[[str], str],
    default_max_tokens: int,
    earlier: Callable[[str], Messages] | None,
    *,
    recorded: bool = False,
    sampled_arguments: Collection[str] = (),
) -> ResponsesRequest:
    """Return the parsed request body. Raises SpecError with every invalid or unsupported parameter.

    policy: returns the version of a model name. earlier: returns the conversation including a response, by the
    response's id, or raises SpecError; None if the server stores no responses. recorded: as in
    `wire.read_request`. sampled_arguments: call arguments that the model wrote, which are accepted even if they are
    invalid JSON.
    """
    parsed, problems = parse_parameters(ResponseBody, body, _NEUTRAL, request_forms.RESPONSES_FIELDS)
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
    items = resolve(items, earlier, problems)
    for index, item in enumerate(items):
        add_item(item, conversation, f"input.{index}", sampled_arguments, problems)
    if not conversation and not problems:
        problems.append(Problem("input", "has reasoning items only, which are discarded; expected a message to answer"))
    tools = [responses_tool(tool, f"tools.{index}", problems) for index, tool in enumerate(parsed.tools or [])]
    strict = not recorded and any(tool.get("strict") is True for tool in parsed.tools or [])
    form = request_forms.responses_form(body, tools, strict, problems)
    if parsed.parallel_tool_calls is False and tools:
        form = request_forms.with_single_call(form, not recorded, problems)
    if parsed.top_logprobs and LOGPROBS not in (parsed.include or []):
        problems.append(Problem("top_logprobs", f"is allowed with include: ['{LOGPROBS}'] only"))
    if problems:
        raise SpecError(problems)
    first = [{"role": "system", "content": parsed.instructions}] if parsed.instructions else []
    sampling = parsed.sampling(parsed.max_output_tokens or default_max_tokens)
    offered = [] if form.calls == () else tools
    messages = [*first, *conversation]
    request = ChatRequest(
        messages,
        offered,
        policy(parsed.model),
        sampling,
        parsed.sampling_seed(),
        form=form,
        alternatives=parsed.top_logprobs or None,
    )
    stored = earlier is not None and parsed.store is not False
    listed = [_listed(tool) for tool in parsed.tools or []]
    choice, text = body.get("tool_choice") or "auto", body.get("text") or {}
    return ResponsesRequest(request, conversation, parsed, listed, stored, choice, text.get("format") or _TEXT)


def response_body(
    answer: ChatCompletion, parsed: ResponsesRequest, head: dict[str, Any], decode: Decode | None
) -> dict[str, Any]:
    """Return the `response` object. head: id, created_at, model. It is completed now."""
    cut = answer.finish_reason == "length"
    prompt, sampled = len(answer.prompt_token_ids), len(answer.token_ids)
    return {
        **unfinished_body(parsed, head),
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer, parsed, head["id"], decode),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def unfinished_body(parsed: ResponsesRequest, head: dict[str, Any]) -> dict[str, Any]:
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
        "tools": parsed.tools,
        "tool_choice": parsed.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": parsed.text_format},
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
    """Return the items of a response: its text, and each of its calls."""
    name = name.removeprefix("resp_")
    text, calls = answer.message.get("content") or "", answer.message.get("tool_calls") or []
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if text or not calls:
        part = text_part(text, text_logprobs(answer, parsed, decode))
        items.append(message_item(f"msg_{name}", [part], status))
    return items + [call_item(name, index, call["id"], call["function"], status) for index, call in enumerate(calls)]


def call_item(name: str, index: int, call_id: str, function: dict[str, Any], status: str) -> dict[str, Any]:
    """Return the item of a function call. name: the response's id without its prefix. index: number of the call."""
    named = {"name": function["name"], "arguments": function["arguments"]}
    return {"type": "function_call", "id": f"fc_{name}_{index}", "call_id": call_id, **named, "status": status}


def message_item(name: str, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """Return the item of an assistant message. name: its id."""
    return {"type": "message", "id": name, "role": "assistant", "status": status, "content": parts}


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the text of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def text_logprobs(tokens: SampledTokens, parsed: ResponsesRequest, decode: Decode | None) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens, if they are requested."""
    if not parsed.logprobs:
        return []
    return [
        {**_with_bytes(entry), "top_logprobs": [_with_bytes(other) for other in entry["top_logprobs"]]}
        for entry in logprobs_of(tokens, decode)
    ]


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "bytes": entry["bytes"] or []}


def _listed(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of a request as the response lists it, with all fields of a function tool."""
    return {"description": None, "parameters": None, "strict": None, **tool}
