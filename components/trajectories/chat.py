"""From messages to tokens and back, with the chat template of the model.

The rule is that sampled tokens are never tokenised again. A prompt is rendered whole only for the first turn of a
history; each later prompt is the tokens so far plus the text that the template puts after the last answer
(`continuation`). Where the template is not prefix-stable (it rewrites earlier turns, as templates that drop old
reasoning do), `continuation` says so by returning None, and a new history begins.

Templates with a place for tools get them there, and calls are read in the form that most such models write:
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Templates without one get the tools in the system message
as signatures, and calls in the pythonic form, `[find_order(order="K482")]`, which takes half the tokens. Calls are
parsed, never evaluated.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from components.errors import ResourceError

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TOOLS = """{system}
Tools:
{signatures}
Call a tool like this: [{example}]"""


@dataclass(frozen=True)
class Stream:
    """The exact tokens of one history."""

    token_ids: list[int]
    """(T,)"""
    spans: list[tuple[int, int]]
    """[start, end) of each assistant message, end-of-turn token included."""


class ChatFormat:
    """The chat template of one tokenizer. Raises ResourceError where there is none, or no end-of-turn token."""

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ResourceError(f"{tokenizer.name_or_path} has no chat template: choose an instruct model")
        self.tokenizer = tokenizer
        self.end, self.end_id = _end_of_turn(tokenizer)
        self.native_tools = "tools" in str(tokenizer.chat_template)
        self.tool_role = "tool" if self.native_tools or self._knows_tool_role() else "user"

    def _knows_tool_role(self) -> bool:
        from jinja2.exceptions import TemplateError

        talk = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "tool", "content": "c?"},
        ]
        try:
            return "c?" in self.tokenizer.apply_chat_template(talk, tokenize=False)
        except TemplateError:
            return False

    # Rendering

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, generate: bool) -> str:
        """The conversation as text; `generate` adds the head of an assistant message to be written."""
        if self.native_tools:
            shown = [_with_parsed_arguments(message) for message in messages]
            return self.tokenizer.apply_chat_template(
                shown, tools=tools or None, tokenize=False, add_generation_prompt=generate
            )
        return self.tokenizer.apply_chat_template(
            _without_tools(messages, tools, self.tool_role), tokenize=False, add_generation_prompt=generate
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Tokens of a whole conversation up to where the next assistant message begins."""
        return self.encode(self.render(messages, tools, generate=True))

    def continuation(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], turn: int, *, closed: bool
    ) -> str | None:
        """Text between the sampled tokens of assistant message `messages[turn]` and the next assistant message.

        `closed`: the sampled tokens end with the end-of-turn token. None where the template rewrites what came
        before, so that the tokens so far cannot be extended.
        """
        through = self.render(messages[: turn + 1], tools, generate=False)
        whole = self.render(messages, tools, generate=True)
        if not whole.startswith(through) or not through.startswith(self.render(messages[:turn], tools, generate=True)):
            return None
        cut = through.rfind(self.end)
        if cut < 0:
            return None
        after = through[cut + len(self.end) :] + whole[len(through) :]
        return after if closed else self.end + after

    def streams(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[Stream]:
        """Tokens of a written conversation (a demonstration), laid out exactly as a rollout would lay them out.

        More than one stream where the template is not prefix-stable: each holds the turns that it could extend.
        """
        done: list[Stream] = []
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        previous = None
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            between = None
            if previous is not None:
                between = self.continuation(messages[:turn], tools, previous, closed=True)
            if between is None:
                if spans:
                    done.append(Stream(ids, spans))
                ids, spans = self.prompt_ids(messages[:turn], tools), []
            else:
                ids = ids + self.encode(between)
            answer = self.encode(self._answer_text(messages, tools, turn))
            spans.append((len(ids), len(ids) + len(answer)))
            ids = ids + answer
            previous = turn
        if spans:
            done.append(Stream(ids, spans))
        return done

    def _answer_text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], turn: int) -> str:
        head = self.render(messages[:turn], tools, generate=True)
        whole = self.render(messages[: turn + 1], tools, generate=False)
        if not whole.startswith(head):
            raise ResourceError(
                f"the chat template of {self.tokenizer.name_or_path} renders an assistant message differently from the "
                "head that it gives for generation, so its tokens cannot be learned exactly; choose another model"
            )
        body = whole[len(head) :]
        cut = body.rfind(self.end)
        return (body[:cut] if cut >= 0 else body) + self.end

    # Parsing

    def parse(self, token_ids: list[int], turn: int) -> dict[str, Any]:
        """The assistant message that sampled tokens say. A call that is no valid JSON stays in the content, where
        the environment can see and answer it. `turn` numbers the calls."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] == self.end_id else token_ids
        text = self.tokenizer.decode(kept, skip_special_tokens=False)
        try:
            content, calls = (_tagged_calls if self.native_tools else _pythonic_calls)(text)
        except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
            return {"role": "assistant", "content": text}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{turn}_{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for index, (name, arguments) in enumerate(calls)
            ]
        return message


def _end_of_turn(tokenizer) -> tuple[str, int]:
    """The special token that the template puts after an assistant message. It may differ from the tokenizer's
    end-of-sequence token, so it is read off a rendered conversation."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "stem"}]
    tail = tokenizer.apply_chat_template(talk, tokenize=False).rpartition("stem")[2]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for token in tokenizer(tail, add_special_tokens=False).input_ids:
        if token in special:
            return tokenizer.convert_ids_to_tokens(token), token
    raise ResourceError(f"the chat template of {tokenizer.name_or_path} does not mark where an assistant message ends")


Calls = list[tuple[str, dict[str, Any]]]


def _tagged_calls(text: str) -> tuple[str, Calls]:
    """(text without calls, calls) of `<tool_call>{...}</tool_call>` blocks. Raises where a block is no call."""
    calls = []
    for match in _CALL.finditer(text):
        call = json.loads(match.group(1))
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError("a call needs a name and a mapping of arguments")
        calls.append((name, arguments))
    return (_CALL.sub("", text).strip() if calls else text), calls


def _pythonic_calls(text: str) -> tuple[str, Calls]:
    """("", calls) of `[name(argument=literal, ...), ...]`; (text, []) where the text is no such list."""
    stripped = text.strip()
    if not (stripped.startswith("[") and stripped.endswith(")]")):
        return text, []
    tree = ast.parse(stripped, mode="eval").body
    calls = []
    for call in tree.elts if isinstance(tree, ast.List) else []:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("not a list of calls with named arguments")
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("** is not an argument")
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        json.dumps(arguments, allow_nan=False)
        calls.append((call.func.id, arguments))
    return ("", calls) if calls else (text, [])


def _pythonic_text(calls: list[dict[str, Any]]) -> str:
    """The inverse of `_pythonic_calls` for OpenAI's form."""
    shown = []
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        listed = ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())
        shown.append(f"{call['function']['name']}({listed})")
    return f"[{', '.join(shown)}]"


def _literal(value: Any) -> str:
    """A Python literal; text in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Templates expect the arguments of a call as a mapping; OpenAI's form holds them as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _without_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]], tool_role: str) -> list[dict[str, str]]:
    """The same conversation for a template that knows only roles and text."""
    shown = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            role = tool_role
            content = content if role == "tool" else f"<tool_response>{content}</tool_response>"
        if message.get("tool_calls"):
            content += _pythonic_text(message["tool_calls"])
        shown.append({"role": role, "content": content})
    if tools:
        if not shown or shown[0]["role"] != "system":
            shown.insert(0, {"role": "system", "content": "You are a helpful assistant."})
        signatures = "\n".join(_signature(tool) for tool in tools)
        text = _TOOLS.format(system=shown[0]["content"], signatures=signatures, example=_example(tools[0]))
        shown[0] = {"role": "system", "content": text}
    return shown


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters", {}).get("properties", {})


def _signature(tool: dict[str, Any]) -> str:
    """`name(argument, ...): description`, a fraction of the tokens of the JSON schema."""
    return f"{tool['function']['name']}({', '.join(_parameters(tool))}): {tool['function'].get('description', '')}"


def _example(tool: dict[str, Any]) -> str:
    return f"{tool['function']['name']}({', '.join(f'{name}=...' for name in _parameters(tool))})"
