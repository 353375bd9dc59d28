"""How actions are written: what an agent is shown of an environment's tools, and how its answers are read.

    native    tools are the chat template's, calls are the message's own `tool_calls`
    react     tools stand in the system message, the answer is Thought and Action, or Answer (arXiv:2210.03629)
    chat      what is said is the action; for environments of text
    code      tools are functions, the answer is a block of Python (`code`, arXiv:2402.01030)

An environment knows only actions with `tool_calls`; a format stands between. An answer that cannot be read is told to
the agent as an observation and counted (`parse_errors`); it uses up a turn. A demonstration is written in the format,
and carried out as what is written there.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, Literal

from components.environments.protocol import Messages, Step
from components.errors import Problem, SpecError
from components.rollout.action_format import Format, Take, Tools, Unreadable, append_system_text
from components.sandbox import Limits

Name = Literal["native", "react", "chat", "code"]


class OneAction:
    """A format in which a message is one action."""

    mark = ""
    counts: dict[str, int] = {}

    async def act(self, message: dict[str, Any], take: Take) -> Step:
        step = await take(self.read(message))
        return replace(step, observation=self.show(step.observation))

    def read(self, message: dict[str, Any]) -> dict[str, Any]:
        """The action that an assistant message stands for. Raises Unreadable."""
        return message

    def show(self, observation: Messages) -> Messages:
        """An observation as the agent is shown it."""
        return observation


class Native(OneAction):
    def opening(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        names = "|".join(re.escape(one["function"]["name"]) for one in tools)
        self._begun = re.compile(rf"<tool_call>|^[^\S\n]*+\[\s*+(?:{names})\s*+\(" if tools else r"(?!)", re.MULTILINE)
        return messages, tools

    def read(self, message: dict[str, Any]) -> dict[str, Any]:
        """A call that the engine could not read is still in the text."""
        if not message.get("tool_calls") and self._begun.search(message.get("content") or ""):
            raise Unreadable("this call of a tool cannot be read; write it again, as it was shown")
        return message

    def write(self, action: dict[str, Any]) -> dict[str, Any]:
        return action


class React(OneAction):
    """One for each episode: it remembers the tools."""

    mark = "Observation: "

    def opening(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        self._text_tool = _text_tool(tools)
        self._calls = 0
        if self._text_tool is not None:
            said = "Answer each time in this form:\nThought: what you think\nAction: your action"
        elif tools:
            listed = "\n".join(_described(one["function"]) for one in tools)
            said = (
                f"Tools:\n{listed}\n\nAnswer each time in one of these forms:\nThought: what you think\n"
                'Action: tool {"argument": "value"}\nor\nThought: what you think\nAnswer: what you say'
            )
        else:
            said = "Answer each time in this form:\nThought: what you think\nAnswer: what you say"
        return append_system_text(messages, said), []

    def read(self, message: dict[str, Any]) -> dict[str, Any]:
        text = re.split(r"^[^\S\n]*+Observation:", message.get("content") or "", maxsplit=1, flags=re.MULTILINE)[0]
        found = list(re.finditer(r"^[^\S\n]*+(Action|Answer):[ \t]*+", text, re.MULTILINE))
        if not found:
            raise Unreadable('no action: end with a line "Action: ..."' + self._or_answer())
        last, rest = found[-1][1], text[found[-1].end() :].strip()
        if last == "Answer" and self._text_tool is None:
            return {"role": "assistant", "content": rest}
        if self._text_tool is not None:
            line = next(iter(rest.splitlines()), "").strip()
            if not line:
                raise Unreadable("the action is empty")
            tool, argument = self._text_tool
            return self._call(tool, json.dumps({argument: line}))
        name = re.match(r"[\w.-]+", rest)
        if name is None:
            raise Unreadable('no tool after "Action:"')
        given = rest[name.end() :].strip()
        try:
            arguments, _ = json.JSONDecoder().raw_decode(given) if given else ({}, 0)
            written = json.dumps(arguments)
        except (ValueError, RecursionError):
            raise Unreadable(f'after {name[0]} expected arguments as JSON, such as {{"argument": "value"}}') from None
        return self._call(name[0], written)

    def show(self, observation: Messages) -> Messages:
        told = [one["content"] for one in observation if one["role"] == "tool"]
        others = [one for one in observation if one["role"] != "tool"]
        return [*([{"role": "user", "content": self.mark + "\n".join(told)}] if told else []), *others]

    def write(self, action: dict[str, Any]) -> dict[str, Any]:
        calls = action.get("tool_calls") or []
        thought = f"Thought: {action['content']}\n" if calls and action.get("content") else ""
        if not calls:
            return {"role": "assistant", "content": f"Answer: {action.get('content') or ''}"}
        if len(calls) > 1:
            raise SpecError([Problem("agent.format", "react: a demonstration calls several tools at once; one a turn")])
        function = calls[0]["function"]
        said = f"{function['name']} {function['arguments']}"
        if self._text_tool is not None:
            said = json.loads(function["arguments"])[self._text_tool[1]]
        return {"role": "assistant", "content": f"{thought}Action: {said}"}

    def _or_answer(self) -> str:
        return "" if self._text_tool is not None else ' or "Answer: ..."'

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        self._calls += 1
        function = {"name": name, "arguments": arguments}
        call = {"id": f"call_{self._calls}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class Chat(OneAction):
    def opening(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        self._text_tool = _text_tool(tools)
        if tools and self._text_tool is None:
            names = ", ".join(one["function"]["name"] for one in tools)
            raise SpecError([Problem("agent.format", f"chat: the environment has tools ({names}); expected react")])
        return messages, []

    def read(self, message: dict[str, Any]) -> dict[str, Any]:
        text = message.get("content") or ""
        if not text.strip():
            raise Unreadable("the action is empty")
        return {"role": "assistant", "content": text}

    def write(self, action: dict[str, Any]) -> dict[str, Any]:
        if not action.get("tool_calls"):
            return action
        assert self._text_tool is not None
        said = [json.loads(call["function"]["arguments"])[self._text_tool[1]] for call in action["tool_calls"]]
        return {"role": "assistant", "content": said[0]}


def make(name: Name, limits: Limits | None = None) -> Format:
    """A format for one episode. limits: of code."""
    if name == "code":
        from components.rollout.code import Code

        return Code(limits or Limits())
    kinds: dict[str, type[Native | React | Chat]] = {"native": Native, "react": React, "chat": Chat}
    return kinds[name]()


def _text_tool(tools: Tools) -> tuple[str, str] | None:
    """Tool and argument, where the only action is a line of text."""
    if len(tools) != 1:
        return None
    function = tools[0]["function"]
    properties = (function.get("parameters") or {}).get("properties") or {}
    if len(properties) != 1:
        return None
    ((argument, schema),) = properties.items()
    return (function["name"], argument) if schema.get("type") == "string" else None


def _described(function: dict[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    arguments = [
        f"{name}{'' if name in required else '?'}: {schema.get('type', 'any')}"
        + (f" ({schema['description']})" if schema.get("description") else "")
        for name, schema in (parameters.get("properties") or {}).items()
    ]
    return f"- {function['name']}({', '.join(arguments)}): {function.get('description', '')}".rstrip(": ")
