"""OpenAI's Responses as JSON, to and from the engine protocol; `wire` is the same for Chat Completions.

A conversation is a list of items here: messages, calls of functions, and what these returned. An answer's text and its
calls are items of their own, and become one assistant message again when they come back, so that the conversation goes
on from the tokens that were sampled. Items of reasoning are dropped: no model here writes any.

As in `wire`, a parameter is carried out, or passes at the value that changes nothing, or is refused with its name and
reason. What this server does not have at all is refused too: built-in tools, images and files, conversations that
OpenAI keeps, background answers. `previous_response_id` needs a server that remembers answers (`earlier`). Extensions:
`seed`, `top_k`, `min_p`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import Problem, SpecError
from components.inference.protocol import ChatCompletion, ChatRequest, Sampling
from components.inference.wire import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Decode,
    MinP,
    Name,
    Seed,
    Temperature,
    Tokens,
    TopK,
    TopP,
    check_arguments,
    check_function,
    logprobs_of,
    unsupported,
)
from components.specs import Spec, validate
from components.specs.validation import shortened

Messages = list[dict[str, Any]]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "parallel_tool_calls": (None, True),
    "prompt": (None,),
    "reasoning": (None, {}, {"effort": None}, {"effort": None, "summary": None}),
    "service_tier": (None, "auto", "default"),
    "stream_options": (None, {}, {"include_obfuscation": False}),
    "text": (None, {}, {"format": {"type": "text"}}),
    "tool_choice": (None, "auto"),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
"""Parameters that the engine cannot carry out, with the values at which there is nothing to carry out."""

LOGPROBS = "message.output_text.logprobs"


class Text(Spec):
    """A part of a message. Fields that a client copies from an answer are not looked at."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class Item(Spec):
    id: str | None = None
    status: str | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Text], Field(max_length=MAX_MESSAGES)]
    phase: None = None


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    """JSON text."""
    parsed_arguments: Any = None
    caller: None = None
    namespace: None = None


class OutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[Text], Field(max_length=MAX_MESSAGES)]
    name: str | None = None
    caller: None = None
    namespace: None = None


class ReasoningItem(Item):
    """Dropped."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


class FunctionTool(Spec):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None


class ResponseBody(Spec):
    """The parameters that are carried out."""

    model: Name
    """`name`, or `name@version` to be answered by that policy or not at all."""
    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    )
    instructions: str | None = None
    """The system message. It is not kept for `previous_response_id`."""
    previous_response_id: str | None = None
    store: bool | None = None
    """Whether a later request may name this one in `previous_response_id`; None and true where the server remembers."""
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    max_output_tokens: Tokens | None = None
    seed: Seed | None = None
    """None draws a new one for each request."""
    stream: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Log-probs are those of all tokens that were sampled, with the text; of reasoning there is none."""
    metadata: dict[str, Any] | None = None
    """The caller's own labels, like the next ones; without effect by definition."""
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


@dataclass(frozen=True)
class Asked:
    """A request, understood."""

    request: ChatRequest
    said: Messages
    """The conversation without the instructions: what an answer that is stored goes on from."""
    body: ResponseBody
    tools: list[dict[str, Any]]
    """As they were sent."""

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
    strict_tools: bool = False,
    spoken: Collection[str] = (),
) -> Asked:
    """Understands a request body; `policy` gives the version that a model name asks for.

    earlier: the conversation up to and with an answer, by its id, or SpecError; None where the server remembers none.
    strict_tools: tools may say `strict`. spoken: arguments of calls as the model wrote them, which are taken back
    though they may be no JSON. Raises SpecError with every parameter that is wrong or cannot be carried out.
    """
    problems = unsupported(body, _NEUTRAL)
    rest = {name: value for name, value in body.items() if name not in _NEUTRAL}
    try:
        asked = validate(ResponseBody, rest, configuration=False)
    except SpecError as error:
        raise SpecError([*problems, *error.problems]) from None
    said: Messages = []
    if earlier is None and (asked.store or asked.previous_response_id is not None):
        name = "store" if asked.store else "previous_response_id"
        problems.append(
            Problem(name, "this server remembers no answers; leave it out and send the whole conversation as input")
        )
    elif earlier is not None and asked.previous_response_id is not None:
        try:
            said += earlier(asked.previous_response_id)
        except SpecError as error:
            problems += error.problems
    given = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    for index, item in enumerate(given):
        _add(item, said, f"input.{index}", spoken, problems)
    tools = [_tool(tool, f"tools.{index}", strict_tools, problems) for index, tool in enumerate(asked.tools or [])]
    if problems:
        raise SpecError(problems)
    first = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    sampling = Sampling(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=max(asked.top_k or 0, 0),
        min_p=asked.min_p or 0.0,
        max_tokens=asked.max_output_tokens or default_max_tokens,
    )
    seed = secrets.randbits(31) if asked.seed is None else asked.seed
    request = ChatRequest([*first, *said], tools, policy(asked.model), sampling, seed)
    return Asked(request, said, asked, asked.tools or [])


def response_body(answer: ChatCompletion, asked: Asked, head: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
    """The `response` object. `head`: id, created_at, model."""
    cut = answer.finish_reason == "length"
    prompt, sampled = len(answer.prompt_token_ids), len(answer.token_ids)
    return {
        **_unfinished(asked, head),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer, asked, head["id"], decode),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def response_events(
    answer: ChatCompletion, asked: Asked, head: dict[str, Any], decode: Decode | None
) -> Iterator[dict[str, Any]]:
    """The same answer as the events of a stream: the response, each item with its parts, the end."""
    whole = response_body(answer, asked, head, decode)
    for number, (kind, event) in enumerate(_events(whole, _unfinished(asked, head))):
        yield {"type": kind, "sequence_number": number, **event}


def _events(whole: dict[str, Any], begun: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **empty}}
        if item["type"] == "message":
            (part,) = item["content"]
            at, logprobs = {**place, "content_index": 0}, part.get("logprobs", [])
            yield "response.content_part.added", {**at, "part": {**part, "text": "", "logprobs": []}}
            yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": logprobs}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": logprobs}
            yield "response.content_part.done", {**at, "part": part}
        else:
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **named}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _unfinished(asked: Asked, head: dict[str, Any]) -> dict[str, Any]:
    body = asked.body
    return {
        **head,
        "object": "response",
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": asked.tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "background": False,
        "metadata": body.metadata or {},
        "user": body.user,
    }


def _output(answer: ChatCompletion, asked: Asked, name: str, decode: Decode | None) -> list[dict[str, Any]]:
    """The items of an answer: its text, and each of its calls."""
    name = name.removeprefix("resp_")
    text, calls = answer.message.get("content") or "", answer.message.get("tool_calls") or []
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if text or not calls:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if asked.logprobs:
            part["logprobs"] = [{**one, "bytes": one["bytes"] or []} for one in logprobs_of(answer, decode)]
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": [part]})
    for index, call in enumerate(calls):
        named = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        item = {"type": "function_call", "id": f"fc_{name}_{index}", "call_id": call["id"], **named, "status": status}
        items.append(item)
    return items


def _add(
    given: dict[str, Any], messages: Messages, path: str, spoken: Collection[str], problems: list[Problem]
) -> None:
    """Adds an item to the conversation, or what is wrong with it to the problems."""
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        problems.append(
            Problem(f"{path}.type", f"{shortened(kind)} is not supported; expected one of {', '.join(_ITEMS)}")
        )
        return
    for name in ("content", "output"):
        for place, part in enumerate(given[name] if kind != "reasoning" and isinstance(given.get(name), list) else []):
            if isinstance(part, dict) and part.get("type") not in ("input_text", "output_text", "text"):
                text = f"{shortened(part.get('type'))} is not supported: this server reads text only"
                problems.append(Problem(f"{path}.{name}.{place}.type", text))
                return
    try:
        item = validate(_ITEMS[kind], given, path=path, configuration=False)
    except SpecError as error:
        problems += error.problems
        return
    match item:
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content)})
        case CallItem():
            check_arguments(item.arguments, f"{path}.arguments", spoken, problems)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":  # text and calls of one answer are one message
                last = messages.pop()
                messages.append({**last, "tool_calls": [*last.get("tool_calls", []), call]})
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        case OutputItem():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _text(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(given: dict[str, Any], path: str, strict: bool, problems: list[Problem]) -> dict[str, Any]:
    """A tool as Chat Completions have it."""
    if given.get("type") != "function":
        expected = "this server runs no tools of its own; expected type 'function'"
        problems.append(Problem(f"{path}.type", f"{shortened(given.get('type'))}: {expected}"))
        return {}
    try:
        tool = validate(FunctionTool, given, path=path, configuration=False)
    except SpecError as error:
        problems += error.problems
        return {}
    check_function({"name": tool.name, "parameters": tool.parameters}, path, problems)
    if tool.strict and not strict:
        problems.append(Problem(f"{path}.strict", "arguments are not held to the schema by this server; send false"))
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
