"""Conversion of messages to tokens and back, with the model's chat template.

Sampled tokens are never retokenized. The whole prompt is rendered only for the first turn of a history. Each later
prompt consists of the tokens so far plus the text that the template puts after the last response (`continuation`). If
the template is not prefix-stable (it rewrites earlier turns, as templates that drop old reasoning do), `continuation`
returns None and a new history begins. docs/concepts/trajectories.md lists the model families that do so.

Tools and calls are left to templates that present tools and write calls as `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`, as most do. For other templates, the system message lists the tools' signatures, and calls are
written in the pythonic form, `[find_order(order="K482")]` (`components.trajectories.tool_calls`).

Messages are adapted to the template's restrictions. Without a system role, the system message becomes part of the first
user message. If user and assistant must alternate, consecutive user and tool messages are merged. A template that reads
the current date always gets the same one, so that equal episodes have equal tokens on any day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from components.errors import EngineError, PromptRefused, ResourceError
from components.trajectories.chat_template import ChatTemplate, Messages, TemplateTooCostly
from components.trajectories.tool_calls import (
    call_id,
    certain_text_pythonic,
    certain_text_tagged,
    read_pythonic,
    read_tagged,
    write_pythonic,
)

TOOLS = """{system}
Tools:
{signatures}
Call a tool like this: [{example}]"""
"""System message with tools, for templates without tool support."""
DEFAULT_SYSTEM = "You are a helpful assistant."
"""Default system message if there are tools."""
_PROBE = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "Any."}}},
    },
}


@dataclass(frozen=True)
class TokenStream:
    """The exact tokens of one history."""

    token_ids: list[int]
    """(T,) token ids."""
    spans: list[tuple[int, int]]
    """Range [start, end) of each assistant message, including its end-of-turn token."""


class ChatFormat:
    """The chat template of one tokenizer. Raises ResourceError without a template or an end-of-turn token.

    A template is a program that is part of the model. If it rejects a conversation, the methods raise PromptRefused.
    """

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ResourceError(f"{tokenizer.name_or_path} has no chat template: choose an instruct model")
        self.tokenizer = tokenizer
        special = {
            *tokenizer.all_special_tokens,
            *(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special),
        } - {""}
        self._special = re.compile(
            "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or r"(?!)"
        )
        self._template = ChatTemplate(tokenizer)
        closing, self.final_ids = self._end_of_turn()
        *before, self.end = tokenizer.convert_ids_to_tokens(closing)
        self.end_id = closing[-1]
        self.closing = "".join(before)
        """Special tokens of a response before `end`, such as Cohere's `<|END_RESPONSE|>`; empty for most templates."""
        self.native_tools = self._supports_tools()
        self.tool_role = "tool" if self.native_tools or self._renders(("user", "assistant", "tool")) else "user"
        self.system_role = self._renders(("system", "user"), which=0)
        self.alternates = not self._renders(("user", "user"))
        self.channel = self._response_channel()
        """Special tokens before a final response that the model samples itself; empty for most templates."""

    def _end_of_turn(self) -> tuple[list[int], list[int]]:
        """Return the special tokens after an assistant message, from rendered conversations, and the tokens that only
        the last message of a conversation has after them, such as Phi-3's `<|endoftext|>`. The last of the former is
        the one with which a response ends; it may differ from the tokenizer's end-of-sequence token."""
        name = self.tokenizer.name_or_path
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "stem"}]
        try:
            last, earlier = self._probe(talk), self._probe([*talk, talk[0]])
        except EngineError as error:
            raise ResourceError(f"{error}: a question and its answer; choose another model") from error
        if "stem" not in last:
            raise ResourceError(
                f"the chat template of {name} does not render the content of an assistant message; expected a template "
                "that reads content as text, not as a list of parts. Choose another model"
            )
        added = self.tokenizer.added_tokens_decoder  # Gemma's have line breaks among them, which end no message
        special = set(self.tokenizer.all_special_ids) | {i for i, token in added.items() if str(token).strip()}
        tail, common = (self.encode(text.rpartition("stem")[2]) for text in (last, earlier))
        start = next((place for place, token in enumerate(tail) if token in special), None)
        if start is None:
            raise ResourceError(f"the chat template of {name} does not mark where an assistant message ends")
        end = start + 1
        while tail[: end + 1] == common[: end + 1] and end < len(tail) and tail[end] in special:
            end += 1
        eos = [place + 1 for place in range(end, len(tail)) if tail[place] == self.tokenizer.eos_token_id]
        return tail[start:end], tail[end : max(eos, default=end)]

    def _supports_tools(self) -> bool:
        """Return True if the template renders tools and writes calls in the tagged form."""
        call = {"id": "call_0_0", "type": "function", "function": {"name": "probe", "arguments": {"word": "a"}}}
        talk: list[dict[str, Any]] = [
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            shown = "Probes." in self._probe(talk[:1], [_PROBE])
            _, tag, written = self._probe(talk, [_PROBE]).rpartition("<tool_call>")
            return shown and read_tagged(tag + written)[1] == [("probe", '{"word": "a"}')]
        except (EngineError, ValueError):
            return False

    def _renders(self, roles: tuple[str, ...], which: int = -1) -> bool:
        """Return True if the template renders a conversation of these roles, including message `which`."""
        talk = [{"role": role, "content": f"probe{number}"} for number, role in enumerate(roles)]
        try:
            return talk[which]["content"] in self._probe(talk)
        except EngineError:
            return False

    def _probe(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """Return a short conversation as text. Raises ResourceError if even that exceeds the template's limits."""
        try:
            return self._template.render([(messages, False)], tools)[0]
        except TemplateTooCostly as error:
            raise ResourceError(
                f"{error}. Choose another model than {self.tokenizer.name_or_path}, or repair its template"
            ) from None

    def _response_channel(self) -> str:
        """Return the special tokens that mark a final response and that the model samples itself, such as
        `<|channel|>final<|message|>`; empty for most templates."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "stem"}]
        head, whole = self._render([(talk[:1], True), (talk, False)], [])
        between = whole.removeprefix(head).partition("stem")[0] if whole.startswith(head) else ""
        return between if self._special.search(between) else ""

    # Rendering

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, generate: bool) -> str:
        """Return the conversation as text; `generate` adds the start of an assistant message. Special tokens in
        messages and tool descriptions, such as `<|im_end|>` on a web page, are escaped as the plain text `<
        |im_end|>`."""
        return self._render([(messages, generate)], tools)[0]

    def _render(self, conversations: Sequence[tuple[Messages, bool]], tools: list[dict[str, Any]]) -> list[str]:
        tools = self._escape(tools)
        shown = [(self._shown(messages, tools), generate) for messages, generate in conversations]
        return self._template.render(shown, (tools or None) if self.native_tools else None)

    def _shown(self, messages: Messages, tools: list[dict[str, Any]]) -> Messages:
        """Return messages as the template reads them."""
        messages = [message if message["role"] == "assistant" else self._escape(message) for message in messages]
        if self.native_tools:
            return [_for_template(message) for message in messages]
        shown = _tools_as_text(messages, tools, self.tool_role)
        if not self.system_role:
            shown = _system_as_user(shown)
        if self.alternates:
            shown = _merge_user_messages(shown)
        return shown

    def _escape(self, data: Any) -> Any:
        """Return JSON data with escaped special tokens."""
        match data:
            case str():
                return self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", data)
            case list():
                return [self._escape(item) for item in data]
            case dict():
                return {self._escape(key): self._escape(item) for key, item in data.items()}
        return data

    def special_token(self, text: str) -> str | None:
        """Return the first special token in a text, such as `<|im_end|>`; None without one."""
        match = self._special.search(text)
        return match[0] if match else None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without added special tokens. Raises PromptRefused for invalid Unicode."""
        try:
            return self.tokenizer(text, add_special_tokens=False).input_ids
        except TypeError as error:
            raise PromptRefused(f"this text is not valid Unicode and cannot be tokenized: {text[:200]!r}") from error

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation up to the start of the next assistant message."""
        return self.encode(self.render(messages, tools, generate=True))

    def continuation(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], turn: int, *, closed: bool
    ) -> str | None:
        """Return the text between the sampled tokens of assistant message `messages[turn]` and the next assistant
        message, or None if the template rewrites earlier messages, so that the tokens so far cannot be extended.

        closed: True if the sampled tokens end with the end-of-turn token.
        """
        head, whole = self._render([(messages[:turn], True), (messages, True)], tools)
        cut = whole.find(self.end, len(head))
        if not whole.startswith(head) or cut < 0:
            return None
        if not _says(whole[len(head) : cut], messages[turn]):
            return None
        after = whole[cut + len(self.end) :]
        return after if closed else self.closing + self.end + after

    def streams(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, final: bool = False
    ) -> list[TokenStream]:
        """Return the tokens of a demonstration, identical to those of a rollout with the same messages.

        A template that is not prefix-stable gives several streams, each with the turns that it could extend. final: a
        last assistant message has the tokens that end a conversation (`final_ids`), which no rollout samples.
        """
        streams: list[TokenStream] = []
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        previous: int | None = None
        for turn, prompt, text in self.responses(messages, tools):
            between: str | None = None
            if previous is not None:
                between = self.continuation(messages[:turn], tools, previous, closed=True)
            if between is None:
                if spans:
                    streams.append(TokenStream(ids, spans))
                ids, spans = self.encode(prompt), []
            else:
                ids = ids + self.encode(between)
            answer = self.encode(text)
            if final and turn == len(messages) - 1:
                answer = answer + self.final_ids
            spans.append((len(ids), len(ids) + len(answer)))
            ids = ids + answer
            previous = turn
        if spans:
            streams.append(TokenStream(ids, spans))
        return streams

    def responses(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
        """Return number, prompt and text of each assistant message, the text as the model would write it. Raises
        ResourceError if the template renders a message differently from its generation prompt."""
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        parts = [(messages[:turn], True) for turn in turns] + [(messages[: turn + 1], False) for turn in turns]
        texts = self._render(parts, tools) if turns else []
        responses = []
        for turn, head, whole in zip(turns, texts[: len(turns)], texts[len(turns) :], strict=True):
            body = self._body(head, whole)
            if body is None:  # a template that moves the system message in later turns
                alone = [{"role": "user", "content": "a"}]
                body = self._body(*self._render([(alone, True), ([*alone, messages[turn]], False)], []))
            if body is None:
                raise ResourceError(
                    f"the chat template of {self.tokenizer.name_or_path} renders the assistant message {turn} "
                    "differently from the head that it gives for generation, so its exact tokens are unknown; correct "
                    "the message, or choose another model"
                )
            responses.append((turn, head, body))
        return responses

    def _body(self, head: str, whole: str) -> str | None:
        """Return the text of an assistant message with its end; None if it does not extend the prompt `head`."""
        if not whole.startswith(head):
            return None
        body = whole[len(head) :]
        cut = body.rfind(self.end)
        return body[: cut if cut >= 0 else None] + self.end

    # Parsing

    def parse(self, token_ids: list[int], turn: int) -> dict[str, Any]:
        """Return the assistant message of sampled tokens. An invalid call stays in the content, where the environment
        can report the error. `turn` is part of the calls' ids."""
        return self.parse_text(self.text_of(token_ids), turn)

    def text_of(self, token_ids: list[int]) -> str:
        """Return the text of sampled tokens, without the end of the turn and earlier channels."""
        body = token_ids[:-1] if token_ids and token_ids[-1] == self.end_id else token_ids
        text = str(self.tokenizer.decode(body, skip_special_tokens=False))
        text = text.rpartition(self.channel)[2] if self.channel else text
        return text.removesuffix(self.closing)

    def parse_text(self, text: str, turn: int) -> dict[str, Any]:
        """Return the assistant message of a text (`parse`)."""
        try:
            content, calls = read_tagged(text) if self.native_tools else read_pythonic(text)
        except (ValueError, RecursionError):
            return {"role": "assistant", "content": text}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {"id": call_id(turn, i), "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(calls)
            ]
        return message

    def certain_text(self, text: str) -> str:
        """Return the part of a growing text with which the content of its message begins, however the text goes on."""
        if self.channel:
            return ""  # the text so far may belong to an earlier channel
        text = text.partition(self.closing)[0] if self.closing else text
        return certain_text_tagged(text) if self.native_tools else certain_text_pythonic(text)


def _says(text: str, message: dict[str, Any]) -> bool:
    """Return True if a template's rendering of an assistant message has its text and the names of its calls, ignoring
    whitespace, which templates trim."""
    text, at = "".join(text.split()), 0
    for part in [message.get("content") or "", *(call["function"]["name"] for call in message.get("tool_calls") or [])]:
        part = "".join(part.split())
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def _named_arguments(call: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and parsed arguments of a call in OpenAI's format. Raises PromptRefused for invalid arguments."""
    name, text = call["function"]["name"], call["function"]["arguments"]
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise PromptRefused(f"a call of the tool {name} has arguments that are not a JSON object: {text!r:.200}")
    return name, arguments


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of OpenAI's format as templates expect it: with text content and call arguments as mappings."""
    shown = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        named = [(call, *_named_arguments(call)) for call in message["tool_calls"]]
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "name": name, "arguments": arguments}}
            for call, name, arguments in named
        ]
    return shown


def _tools_as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]], tool_role: str) -> list[dict[str, str]]:
    """Return the conversation for a template without tool support: roles and text only."""
    shown: list[dict[str, str]] = []
    answers: list[str] = []
    """Results of consecutive tool messages, which become one user message."""
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if message.get("tool_calls"):
            written = write_pythonic([_named_arguments(call) for call in message["tool_calls"]])
            content = f"{content}\n{written}" if content else written
        if role == "tool" and tool_role == "user":
            answers.append(f"<tool_response>{content}</tool_response>")
            continue
        shown += _user_message(answers)
        answers = []
        shown.append({"role": role, "content": content})
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


def _system_as_user(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the conversation for a template without a system role: the system message becomes a user message."""
    return [{**message, "role": "user"} if message["role"] == "system" else message for message in messages]


def _merge_user_messages(messages: list[dict[str, str]]) -> list[dict[str, str]]:
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
