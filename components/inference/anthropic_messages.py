"""Requests of Anthropic's Messages as conversations for an engine; `anthropic_events` has their answers.

A message is a text or a list of blocks. An assistant message has the blocks of one answer: its thinking, its text, its
calls (`tool_use`). A user message has results of calls, each of which becomes a message of its own (role `tool`), and
texts. Consecutive messages of one role are one turn. Texts of one message are joined by a line break.

The input of a call is a JSON object in this API, and JSON text in the model's conversation.

Unsupported features are rejected: images, documents and citations, built-in tools, an answer that continues an
assistant message. `cache_control` is a hint without effect on answers: the engine finds shared prefixes by itself.
Extensions: `seed`, `min_p`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import Problem, SpecError
from components.inference.protocol import ChatRequest
from components.inference.request_bodies import (
    MAX_MESSAGES,
    MAX_STOPS,
    Name,
    Neutral,
    RequestBody,
    RequestContext,
    SamplingBody,
    StopString,
    Tokens,
    parse_parameters,
    read_body,
)
from components.inference.request_forms import MAX_TOOLS, CacheControl, messages_offer
from components.specs.wording import shortened

_NEUTRAL: Neutral = {
    "container": (None,),
    "context_management": (None,),
    "diagnostics": (None,),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
    "user_profile_id": (None,),
    "workspace_id": (None,),
}
"""Unsupported parameters, with their neutral values, which are accepted."""
FAILED_RESULT = "Error: "
"""Text before the result of a failed call (`is_error`), for which chat templates have no field."""


class ContentBlock(RequestBody):
    """Fields common to the blocks of a message."""

    cache_control: CacheControl | None = None


class TextBlock(ContentBlock):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(RequestBody):
    """Reasoning before the text or the calls of the same answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Field of Anthropic's servers; it has no effect."""


class DirectCaller(RequestBody):
    """The model as the caller of a tool."""

    type: Literal["direct"]


class ToolUseBlock(ContentBlock):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(ContentBlock):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[dict[str, Any]] | None = Field(None, max_length=MAX_MESSAGES)
    is_error: bool | None = None
    toolset_name: None = None


_BLOCKS: dict[str, dict[str, type[RequestBody]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": {"text": TextBlock},
    "tool": {"text": TextBlock},
}
"""Supported blocks, by the role of their message; those of the result of a call under `tool`."""


class MessageBody(RequestBody):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]


class ThinkingSettings(RequestBody):
    """`thinking`. The chat template decides whether a model reasons."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Tokens | None = None
    """Tokens after which unfinished reasoning is ended (`Sampling.max_thinking_tokens`)."""
    display: Literal["summarized"] | None = None


class OutputConfig(RequestBody):
    """`output_config`."""

    effort: None = None
    format: dict[str, Any] | None = None


class Metadata(RequestBody):
    """The caller's label, which has no effect."""

    user_id: str | None = None


class ConversationBody(SamplingBody):
    """The supported parameters of a conversation, whose tokens can be counted."""

    messages: list[MessageBody] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesBody(ConversationBody):
    """The supported parameters of a request for an answer."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    metadata: Metadata | None = None


def read_request(body: dict[str, Any], context: RequestContext) -> tuple[ChatRequest, MessagesBody]:
    """Return the request for the engine, and the parsed body. Raises SpecError with every invalid or unsupported
    parameter."""
    parsed, problems = parse_parameters(MessagesBody, body, _NEUTRAL)
    request = _conversation(parsed, context, problems)
    budget = parsed.thinking.budget_tokens if parsed.thinking and not context.recorded else None
    sampling = replace(parsed.sampling(parsed.max_tokens), max_thinking_tokens=budget)
    return replace(request, sampling=sampling, stop=tuple(parsed.stop_sequences or ())), parsed


def read_count(body: dict[str, Any], context: RequestContext) -> ChatRequest:
    """Return a conversation whose tokens are to be counted. Raises SpecError as `read_request`."""
    return _conversation(*parse_parameters(ConversationBody, body, _NEUTRAL)[:1], context, [])


def _conversation(body: ConversationBody, context: RequestContext, problems: list[Problem]) -> ChatRequest:
    reader = _Reader(context, problems)
    if body.system:
        reader.messages.append({"role": "system", "content": reader.text(body.system, "system", "system")})
    for index, message in enumerate(body.messages):
        reader.add(message, f"messages.{index}")
    if body.messages[-1].role == "assistant":
        text = "this server does not continue an assistant message; the last message must be the user's"
        problems.append(Problem(f"messages.{len(body.messages) - 1}.role", text))
    wanted = body.output_config.format if body.output_config else None
    offer = messages_offer(body.tools or [], body.tool_choice, wanted, context, problems)
    if problems:
        raise SpecError(problems)
    policy, seed = context.policy(body.model), body.sampling_seed()
    return ChatRequest(reader.messages, offer.tools, policy, seed=seed, agent=context.agent, form=offer.form)


@dataclass
class _Reader:
    """Reader of messages, which adds their problems."""

    context: RequestContext
    problems: list[Problem]

    def __post_init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, message: MessageBody, path: str) -> None:
        """Add a message, or the messages of its blocks."""
        content = message.content
        blocks: list[Any] = [TextBlock(type="text", text=content)] if isinstance(content, str) else []
        blocks += [] if isinstance(content, str) else self._blocks(content, message.role, f"{path}.content")
        texts, calls, thoughts = [], [], []
        for block in blocks:
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case ToolResultBlock():
                    self._add_result(block, f"{path}.content")
        if texts or calls or thoughts or not blocks:
            self._add_turn(message.role, "\n".join(texts), calls, "\n".join(thoughts))

    def text(self, content: str | list[dict[str, Any]], role: str, path: str) -> str:
        """Return a text, or the joined texts of blocks. role: of their message."""
        if isinstance(content, str):
            return content
        return "\n".join(block.text for block in self._blocks(content, role, path))

    def _blocks(self, blocks: list[dict[str, Any]], role: str, path: str) -> list[Any]:
        """Return the blocks that are valid."""
        read, known = [], _BLOCKS[role]
        for index, block in enumerate(blocks):
            kind = block.get("type")
            if not isinstance(kind, str) or kind not in known:
                place = "the result of a call" if role == "tool" else f"a message of role '{role}'"
                text = f"{shortened(kind)} is not supported in {place}; expected one of {', '.join(known)}"
                self.problems.append(Problem(f"{path}.{index}.type", text))
                continue
            try:
                read.append(read_body(known[kind], block, f"{path}.{index}"))
            except SpecError as error:
                self.problems += error.problems
        return read

    def _add_result(self, block: ToolResultBlock, path: str) -> None:
        content = (FAILED_RESULT if block.is_error else "") + self.text(block.content or "", "tool", path)
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})

    def _add_turn(self, role: str, content: str, calls: list[dict[str, Any]], reasoning: str) -> None:
        """Add a message, to the last one if that has the same role."""
        last = self.messages.pop() if self.messages and self.messages[-1]["role"] == role != "system" else {}
        message: dict[str, Any] = {"role": role}
        message["content"] = "\n".join(filter(None, (last.get("content"), content)))
        if calls := [*last.get("tool_calls", []), *calls]:
            message["tool_calls"] = calls
        if reasoning := "\n".join(filter(None, (last.get("reasoning"), reasoning))):
            message["reasoning"] = reasoning
        self.messages.append(message)
