"""From messages to tokens and back, with the chat template of the model.

The rule is that sampled tokens are never tokenised again. A prompt is rendered whole only for the first turn of a
history; each later prompt is the tokens so far plus the text that the template puts after the last answer
(`continuation`). Where the template is not prefix-stable (it rewrites earlier turns, as templates that drop old
reasoning do), `continuation` says so by returning None, and a new history begins. docs/trajectories.md shows which
families of models do so.

A template that shows tools and writes calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as most do,
is left to it. With any other, tools are shown in the system message as signatures, and calls are written in the
pythonic form, `[find_order(order="K482")]` (`components.trajectories.tool_calls`).

What a template refuses is written as it takes it: a system message goes before the user's first words where there is no
such role, and what users and tools say in a row becomes one message where user and assistant have to take turns. A
template that asks for today's date is always told the same one: equal episodes are equal tokens, whatever the day.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from components.errors import EngineError, PromptRefused, ResourceError
from components.trajectories.tool_calls import read_pythonic, read_tagged, write_pythonic

TOOLS = """{system}
Tools:
{signatures}
Call a tool like this: [{example}]"""
"""A system message that offers tools, for templates that have no place for them."""
DEFAULT_SYSTEM = "You are a helpful assistant."
"""Where there is none, and tools are offered."""
TODAY = datetime(2025, 1, 1)
"""What templates are told that ask for the date."""
_PROBE = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "Any."}}},
    },
}


@dataclass(frozen=True)
class Stream:
    """The exact tokens of one history."""

    token_ids: list[int]
    """(T,)"""
    spans: list[tuple[int, int]]
    """[start, end) of each assistant message, end-of-turn token included."""


class ChatFormat:
    """The chat template of one tokenizer. Raises ResourceError where there is none, or no end-of-turn token.

    A template is a program that came with the model; where it refuses a conversation, its methods raise PromptRefused.
    """

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ResourceError(f"{tokenizer.name_or_path} has no chat template: choose an instruct model")
        self.tokenizer = tokenizer
        special = {
            *tokenizer.all_special_tokens,
            *(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special),
        }
        self._special = re.compile(
            "|".join(re.escape(one) for one in sorted(special, key=len, reverse=True)) or r"(?!)"
        )
        self.end, self.end_id = self._end_of_turn()
        self.native_tools = self._knows_tools()
        self.tool_role = "tool" if self.native_tools or self._shows(("user", "assistant", "tool")) else "user"
        self.system_role = self._shows(("system", "user"), which=0)
        self.alternates = not self._shows(("user", "user"))
        self._channel = self._answer_channel()

    def _end_of_turn(self) -> tuple[str, int]:
        """The special token that the template puts after an assistant message. It may differ from the tokenizer's
        end-of-sequence token, so it is read off a rendered conversation."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "stem"}]
        try:
            tail = self._apply(talk).rpartition("stem")[2]
        except EngineError as error:
            raise ResourceError(f"{error}: a question and its answer; choose another model") from error
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        for token in self.encode(tail):
            if token in special:
                return self.tokenizer.convert_ids_to_tokens(token), token
        raise ResourceError(
            f"the chat template of {self.tokenizer.name_or_path} does not mark where an assistant message ends"
        )

    def _knows_tools(self) -> bool:
        """Whether the template shows tools, and writes calls in the form that is read here."""
        call = {"id": "call_0_0", "type": "function", "function": {"name": "probe", "arguments": {"word": "a"}}}
        talk: list[dict[str, Any]] = [
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            shown = "Probes." in self._apply(talk[:1], tools=[_PROBE])
            _, tag, written = self._apply(talk, tools=[_PROBE]).rpartition("<tool_call>")
            return shown and read_tagged(tag + written)[1] == [("probe", '{"word": "a"}')]
        except (EngineError, ValueError):
            return False

    def _shows(self, roles: tuple[str, ...], which: int = -1) -> bool:
        """Whether a conversation of these roles is rendered, and one of its messages, the last by default, with it."""
        talk = [{"role": role, "content": f"probe{number}"} for number, role in enumerate(roles)]
        try:
            return talk[which]["content"] in self._apply(talk)
        except EngineError:
            return False

    def _answer_channel(self) -> str:
        """What the template puts before an answer to mark it as one, and the model writes itself, as
        `<|channel|>final<|message|>`; empty for most."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "stem"}]
        head, whole = self.render(talk[:1], [], generate=True), self.render(talk, [], generate=False)
        between = whole.removeprefix(head).partition("stem")[0] if whole.startswith(head) else ""
        return between if self._special.search(between) else ""

    # Rendering

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=TODAY.strftime, **options)
        except Exception as error:
            raise PromptRefused(
                f"the chat template of {self.tokenizer.name_or_path} refuses the conversation "
                f"({type(error).__name__}: {error})"
            ) from error

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, generate: bool) -> str:
        """The conversation as text; `generate` adds the head of an assistant message to be written. Special tokens that
        somebody else than the template writes, such as a page or the description of a tool that says `<|im_end|>`, lose
        their meaning: they are text, `< |im_end|>`."""
        messages = [one if one["role"] == "assistant" else self._harmless(one) for one in messages]
        tools = self._harmless(tools)
        if self.native_tools:
            shown = [_as_template_takes_it(message) for message in messages]
            return self._apply(shown, tools=tools or None, add_generation_prompt=generate)
        shown = _without_tools(messages, tools, self.tool_role)
        if not self.system_role:
            shown = _without_system(shown)
        if self.alternates:
            shown = _in_turn(shown)
        return self._apply(shown, add_generation_prompt=generate)

    def _harmless(self, data: Any) -> Any:
        match data:
            case str():
                return self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", data)
            case list():
                return [self._harmless(one) for one in data]
            case dict():
                return {self._harmless(key): self._harmless(one) for key, one in data.items()}
        return data

    def encode(self, text: str) -> list[int]:
        try:
            return self.tokenizer(text, add_special_tokens=False).input_ids
        except TypeError as error:
            raise PromptRefused(f"this cannot be tokenised, for it is no valid Unicode: {text[:200]!r}") from error

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Tokens of a whole conversation up to where the next assistant message begins."""
        return self.encode(self.render(messages, tools, generate=True))

    def continuation(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], turn: int, *, closed: bool
    ) -> str | None:
        """Text between the sampled tokens of assistant message `messages[turn]` and the next assistant message.

        `closed`: the sampled tokens end with the end-of-turn token. None where the template rewrites what came
        before, the answer among it, so that the tokens so far cannot be extended.
        """
        head = self.render(messages[:turn], tools, generate=True)
        whole = self.render(messages, tools, generate=True)
        cut = whole.find(self.end, len(head))
        if not whole.startswith(head) or cut < 0:
            return None
        if not _says(whole[len(head) : cut], messages[turn]):
            return None
        after = whole[cut + len(self.end) :]
        return after if closed else self.end + after

    def streams(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[Stream]:
        """Tokens of a written conversation (a demonstration), laid out exactly as a rollout would lay them out.

        More than one stream where the template is not prefix-stable: each holds the turns that it could extend.
        """
        done: list[Stream] = []
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        previous: int | None = None
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            between: str | None = None
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
        alone = [{"role": "user", "content": "a"}]  # for templates that move the system message as the talk goes on
        for before, offered in ((messages[:turn], tools), (alone, [])):
            head = self.render(before, offered, generate=True)
            whole = self.render([*before, messages[turn]], offered, generate=False)
            if whole.startswith(head):
                body = whole[len(head) :]
                cut = body.rfind(self.end)
                return (body[:cut] if cut >= 0 else body) + self.end
        raise ResourceError(
            f"the chat template of {self.tokenizer.name_or_path} renders an assistant message differently from the "
            "head that it gives for generation, so its tokens cannot be learned exactly; choose another model"
        )

    # Parsing

    def parse(self, token_ids: list[int], turn: int) -> dict[str, Any]:
        """The assistant message that sampled tokens say. What begins like a call and is none stays in the content,
        where the environment can see and answer it. `turn` numbers the calls."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] == self.end_id else token_ids
        text = self.tokenizer.decode(kept, skip_special_tokens=False)
        if self._channel:
            text = text.rpartition(self._channel)[2]
        try:
            content, calls = read_tagged(text) if self.native_tools else read_pythonic(text)
        except (ValueError, RecursionError):
            return {"role": "assistant", "content": text}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{turn}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)
            ]
        return message


def _says(text: str, message: dict[str, Any]) -> bool:
    """Whether a template's text of an assistant message holds its words and the names that it calls; space aside, which
    templates trim."""
    text, at = "".join(text.split()), 0
    for part in [message.get("content") or "", *(one["function"]["name"] for one in message.get("tool_calls") or [])]:
        part = "".join(part.split())
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def _named_arguments(call: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call in OpenAI's form, where arguments are JSON text."""
    name, text = call["function"]["name"], call["function"]["arguments"]
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise PromptRefused(f"a call of the tool {name} has arguments that are no JSON object: {text!r:.200}")
    return name, arguments


def _as_template_takes_it(message: dict[str, Any]) -> dict[str, Any]:
    """Templates expect text, and the arguments of a call as a mapping; OpenAI's form has None, and JSON text."""
    shown = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        named = [(call, *_named_arguments(call)) for call in message["tool_calls"]]
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "name": name, "arguments": arguments}}
            for call, name, arguments in named
        ]
    return shown


def _without_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]], tool_role: str) -> list[dict[str, str]]:
    """The same conversation for a template that knows only roles and text."""
    shown: list[dict[str, str]] = []
    answers: list[str] = []
    """Answers of tools in a row, which become one message of the user's."""
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if message.get("tool_calls"):
            written = write_pythonic([_named_arguments(call) for call in message["tool_calls"]])
            content = f"{content}\n{written}" if content else written
        if role == "tool" and tool_role == "user":
            answers.append(f"<tool_response>{content}</tool_response>")
            continue
        shown += _one_message(answers)
        answers = []
        shown.append({"role": role, "content": content})
    shown += _one_message(answers)
    if tools:
        if not shown or shown[0]["role"] != "system":
            shown.insert(0, {"role": "system", "content": DEFAULT_SYSTEM})
        signatures = "\n".join(_signature(tool) for tool in tools)
        text = TOOLS.format(system=shown[0]["content"], signatures=signatures, example=_example(tools[0]))
        shown[0] = {"role": "system", "content": text}
    return shown


def _one_message(texts: list[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n".join(texts)}] if texts else []


def _without_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """For a template without the role: what the system says is said by the user, before all else."""
    return [{**message, "role": "user"} if message["role"] == "system" else message for message in messages]


def _in_turn(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """For a template in which user and assistant take turns: what users say in a row is one message."""
    shown: list[dict[str, str]] = []
    for is_user, run in groupby(messages, key=lambda message: message["role"] == "user"):
        said = list(run)
        shown += _one_message([message["content"] for message in said]) if is_user else said
    return shown


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return (tool["function"].get("parameters") or {}).get("properties") or {}


def _signature(tool: dict[str, Any]) -> str:
    """`name(argument, ...): description`, a fraction of the tokens of the JSON schema."""
    return f"{tool['function']['name']}({', '.join(_parameters(tool))}): {tool['function'].get('description', '')}"


def _example(tool: dict[str, Any]) -> str:
    return f"{tool['function']['name']}({', '.join(f'{name}=...' for name in _parameters(tool))})"
