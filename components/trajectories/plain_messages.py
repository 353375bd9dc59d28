"""Conversations for templates without tool support: tools in the system message, calls and results as text.

Messages are also adapted to a template's restrictions: without a system role, the system message becomes part of the
first user message; if user and assistant must alternate, consecutive user messages are merged.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from components.errors import PromptRefused
from components.trajectories.call_forms.pythonic import write_pythonic

TOOLS = """{system}
Tools:
{signatures}
Call a tool like this: [{example}]"""
"""System message with tools, for templates without tool support."""
DEFAULT_SYSTEM = "You are a helpful assistant."
"""Default system message if there are tools."""


def named_arguments(call: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and parsed arguments of a call in OpenAI's format. Raises PromptRefused for invalid arguments."""
    name, text = call["function"]["name"], call["function"]["arguments"]
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise PromptRefused(f"a call of the tool {name} has arguments that are not a JSON object: {text!r:.200}")
    return name, arguments


def tools_as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]], tool_role: str) -> list[dict[str, str]]:
    """Return the conversation for a template without tool support: roles and text only."""
    shown: list[dict[str, str]] = []
    answers: list[str] = []
    """Results of consecutive tool messages, which become one user message."""
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if message.get("tool_calls"):
            written = write_pythonic([named_arguments(call) for call in message["tool_calls"]])
            content = f"{content}\n{written}" if content else written
        if role == "tool" and tool_role == "user":
            answers.append(f"<tool_response>{content}</tool_response>")
            continue
        shown += _user_message(answers)
        answers = []
        reasoning = {"reasoning": message["reasoning"]} if message.get("reasoning") is not None else {}
        shown.append({"role": role, "content": content, **reasoning})
    shown += _user_message(answers)
    if tools:
        if not shown or shown[0]["role"] != "system":
            shown.insert(0, {"role": "system", "content": DEFAULT_SYSTEM})
        signatures = "\n".join(_signature(tool) for tool in tools)
        text = TOOLS.format(system=shown[0]["content"], signatures=signatures, example=_example(tools[0]))
        shown[0] = {"role": "system", "content": text}
    return shown


def _user_message(texts: list[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n".join(texts)}] if texts else []


def system_as_user(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the conversation for a template without a system role: the system message becomes a user message."""
    return [{**message, "role": "user"} if message["role"] == "system" else message for message in messages]


def merge_user_messages(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the conversation for a template with alternating roles: consecutive user messages are merged."""
    shown: list[dict[str, str]] = []
    for is_user, run in groupby(messages, key=lambda message: message["role"] == "user"):
        group = list(run)
        shown += _user_message([message["content"] for message in group]) if is_user else group
    return shown


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return (tool["function"].get("parameters") or {}).get("properties") or {}


def _signature(tool: dict[str, Any]) -> str:
    """Return `name(argument, ...): description`, which has a fraction of the JSON schema's tokens."""
    return f"{tool['function']['name']}({', '.join(_parameters(tool))}): {tool['function'].get('description', '')}"


def _example(tool: dict[str, Any]) -> str:
    return f"{tool['function']['name']}({', '.join(f'{name}=...' for name in _parameters(tool))})"
