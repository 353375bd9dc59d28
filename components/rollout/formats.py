"""Action formats: presentation of an environment's tools to an agent, and parsing of its responses.

    native    the chat template presents tools; actions are the message's `tool_calls`
    react     the system message lists tools; a response is Thought and Action, or Answer (arXiv:2210.03629)
    chat      the message text is the action, for text environments
    code      tools are functions; a response is a Python block (`code`, arXiv:2402.01030)

Environments only accept actions with `tool_calls` or text; a format translates. A response that cannot be parsed uses
up a turn, is counted (`parse_errors`), and the agent reads the error as an observation. A demonstration is written in
the format, parsed and executed like a response.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from components.environments.protocol import Messages, Step
from components.errors import Problem, SpecError
from components.rollout.action_format import Format, Take, Tools, UnparsedAction, append_system_text
from components.sandbox import Limits
from components.trajectories.roles import MAIN
from components.trajectories.schema import Scenario

Name = Literal["native", "react", "chat", "code"]

MAX_OBSERVATION = 100_000
"""Default maximum number of characters per environment message."""


@dataclass(frozen=True, slots=True)
class Presentation:
    """Presentation of an environment to an agent."""

    format: Name = "native"
    """Action format."""
    max_observation: int = MAX_OBSERVATION
    """Maximum number of characters per environment message. Longer messages are truncated and marked."""
    limits: Limits | None = None
    """Resource limits of a code block (format `code`)."""
    by_environment: bool = False
    """True: the agent has the name of the scenario's environment in a mixture."""

    def agent(self, scenario: Scenario) -> str:
        """Return the name of the agent that plays a scenario."""
        return scenario.type.partition("/")[0] if self.by_environment else MAIN


class SingleActionFormat:
    """A format with one action per message."""

    mark = ""
    counts: dict[str, int] = {}

    async def act(self, message: dict[str, Any], take: Take) -> Step:
        step = await take(self.read(message))
        return replace(step, observation=self.show(step.observation))

    def read(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the action of an assistant message. Raises UnparsedAction."""
        return message

    def show(self, observation: Messages) -> Messages:
        """Return an observation as the agent reads it."""
        return observation


class Native(SingleActionFormat):
    """The chat template's own tool calls, which the engine reads (`ChatCompletion.invalid_call`)."""

    def opening(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        return messages, tools

    def write(self, action: dict[str, Any]) -> dict[str, Any]:
        return action


class React(SingleActionFormat):
    """Thought and Action as text (ReAct); holds the tools of one episode."""

    mark = "Observation: "

    def opening(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        self._text_tool = text_tool(tools)
        self._calls = 0
        if self._text_tool is not None:
            instructions = "Answer each time in this form:\nThought: what you think\nAction: your action"
        elif tools:
            signatures = "\n".join(_signature(tool["function"]) for tool in tools)
            instructions = (
                f"Tools:\n{signatures}\n\nAnswer each time in one of these forms:\nThought: what you think\n"
                'Action: tool {"argument": "value"}\nor\nThought: what you think\nAnswer: what you say'
            )
        else:
            instructions = "Answer each time in this form:\nThought: what you think\nAnswer: what you say"
        return append_system_text(messages, instructions), []

    def read(self, message: dict[str, Any]) -> dict[str, Any]:
        text = re.split(r"^[^\S\n]*+Observation:", message.get("content") or "", maxsplit=1, flags=re.MULTILINE)[0]
        markers = list(re.finditer(r"^[^\S\n]*+(Action|Answer):[ \t]*+", text, re.MULTILINE))
        if not markers:
            raise UnparsedAction('no action: end with a line "Action: ..."' + self._or_answer())
        marker, content = markers[-1][1], text[markers[-1].end() :].strip()
        if marker == "Answer" and self._text_tool is None:
            return {"role": "assistant", "content": content}
        if self._text_tool is not None:
            line = next(iter(content.splitlines()), "").strip()
            if not line:
                raise UnparsedAction("the action is empty")
            tool, argument = self._text_tool
            return self._call(tool, json.dumps({argument: line}))
        name = re.match(r"[\w.-]+", content)
        if name is None:
            raise UnparsedAction('no tool after "Action:"')
        json_text = content[name.end() :].strip()
        try:
            arguments, _ = json.JSONDecoder().raw_decode(json_text) if json_text else ({}, 0)
            written = json.dumps(arguments)
        except (ValueError, RecursionError):
            raise UnparsedAction(
                f'after {name[0]} expected arguments as JSON, such as {{"argument": "value"}}'
            ) from None
        return self._call(name[0], written)

    def show(self, observation: Messages) -> Messages:
        results = [message["content"] for message in observation if message["role"] == "tool"]
        others = [message for message in observation if message["role"] != "tool"]
        return [*([{"role": "user", "content": self.mark + "\n".join(results)}] if results else []), *others]

    def write(self, action: dict[str, Any]) -> dict[str, Any]:
        calls = action.get("tool_calls") or []
        thought = f"Thought: {action['content']}\n" if calls and action.get("content") else ""
        if not calls:
            return {"role": "assistant", "content": f"Answer: {action.get('content') or ''}"}
        if len(calls) > 1:
            raise SpecError([Problem("agent.format", "react: a demonstration calls several tools at once; one a turn")])
        function = calls[0]["function"]
        action_text = f"{function['name']} {function['arguments']}"
        if self._text_tool is not None:
            action_text = json.loads(function["arguments"])[self._text_tool[1]]
        return {"role": "assistant", "content": f"{thought}Action: {action_text}"}

    def _or_answer(self) -> str:
        return "" if self._text_tool is not None else ' or "Answer: ..."'

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        self._calls += 1
        function = {"name": name, "arguments": arguments}
        call = {"id": f"call_{self._calls}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class ChatActions(SingleActionFormat):
    """The message text as the action."""

    def opening(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        self._text_tool = text_tool(tools)
        if tools and self._text_tool is None:
            names = ", ".join(tool["function"]["name"] for tool in tools)
            raise SpecError([Problem("agent.format", f"chat: the environment has tools ({names}); expected react")])
        return messages, []

    def read(self, message: dict[str, Any]) -> dict[str, Any]:
        text = message.get("content") or ""
        if not text.strip():
            raise UnparsedAction("the action is empty")
        return {"role": "assistant", "content": text}

    def write(self, action: dict[str, Any]) -> dict[str, Any]:
        if not action.get("tool_calls"):
            return action
        assert self._text_tool is not None
        texts = [json.loads(call["function"]["arguments"])[self._text_tool[1]] for call in action["tool_calls"]]
        return {"role": "assistant", "content": texts[0]}


def make(name: Name, limits: Limits | None = None) -> Format:
    """Return a format for one episode. limits: resource limits of code (format `code`)."""
    if name == "code":
        from components.rollout.code import CodeActions

        return CodeActions(limits or Limits())
    kinds: dict[str, type[Native | React | ChatActions]] = {"native": Native, "react": React, "chat": ChatActions}
    return kinds[name]()


def text_tool(tools: Tools) -> tuple[str, str] | None:
    """Return tool and argument if the only tool has a single string argument; else None."""
    if len(tools) != 1:
        return None
    function = tools[0]["function"]
    properties = (function.get("parameters") or {}).get("properties") or {}
    if len(properties) != 1:
        return None
    ((argument, schema),) = properties.items()
    return (function["name"], argument) if schema.get("type") == "string" else None


def _signature(function: dict[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    arguments = [
        f"{name}{'' if name in required else '?'}: {schema.get('type', 'any')}"
        + (f" ({schema['description']})" if schema.get("description") else "")
        for name, schema in (parameters.get("properties") or {}).items()
    ]
    return f"- {function['name']}({', '.join(arguments)}): {function.get('description', '')}".rstrip(": ")
