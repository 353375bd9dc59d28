"""Presentation of tools and form of calls of a chat template, from renderings of a probe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any
from zlib import crc32

from components.errors import EngineError, ResourceError
from components.trajectories.call_forms import FORMS
from components.trajectories.call_forms.marked import CallForm
from components.trajectories.chat_template import ChatTemplate, Messages
from components.trajectories.plain_messages import named_arguments
from components.trajectories.special_tokens import SpecialTokens

PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Probes.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "Any."}}},
        },
    }
    for name in ("probe", "second")
]
"""Two tools that no environment has, for probes of a template."""
_CALLS = [
    {"id": f"call_0_{index}", "type": "function", "function": {"name": name, "arguments": '{"word": "a"}'}}
    for index, name in enumerate(("probe", "second"))
]
_READ = [("probe", '{"word": "a"}'), ("second", '{"word": "a"}')]
PYTHONIC = "pythonic"
"""Name of the form of templates without calls (`components.trajectories.call_forms.pythonic`)."""
_SYSTEM, _USER, _RESULT = "root", "stem", "leaf"


class NativeCalls:
    """The calls of a chat template. end: text after an assistant message. named: form of the calls, which the template
    has to write; None for the first known one that it writes."""

    def __init__(self, template: ChatTemplate, special_tokens: SpecialTokens, end: str, named: str | None = None):
        self._template = template
        self._special_tokens = special_tokens
        self._end = end
        self._arguments_as_text = False
        """True if the template reads the arguments of calls as JSON text, as DeepSeek's does."""
        self._id = _given_id
        """Returns the id with which the template shows a call."""
        self.form = self._form([form for name, form in FORMS.items() if named in (None, name)])
        """Form of the calls; None if the template does not present tools, does not write the named form or one that is
        known, or drops the system message or the results after calls, as that of Mistral Nemo."""
        self.single = self.form is not None and not self._writes_both()
        """True if the template refuses or drops the second call of a message."""
        self.end = self._end_of_calls()
        """Special token after a message with calls; None if it is that of other messages."""

    def messages(self, messages: Messages) -> Messages:
        """Return a conversation of OpenAI's format as the template expects it: with text content, call arguments as
        mappings or as text, ids of calls in the template's form, and reasoning under the names that templates read."""
        ids: dict[str, str] = {}
        count = 0
        shown = []
        for message in messages:
            shown.append({**message, "content": message.get("content") or ""})
            if (reasoning := shown[-1].pop("reasoning", None)) is not None:
                shown[-1] |= {"reasoning_content": reasoning, "thinking": reasoning}
            if calls := message.get("tool_calls"):
                shown[-1]["tool_calls"] = [self._call(call, number) for number, call in enumerate(calls, count)]
                count += len(calls)
                ids |= {old["id"]: new["id"] for old, new in zip(calls, shown[-1]["tool_calls"], strict=True)}
            if message.get("tool_call_id") in ids:
                shown[-1]["tool_call_id"] = ids[message["tool_call_id"]]
        return shown

    def written(self, calls: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """Return calls as the template writes them, without the end of the message. Raises PromptRefused if it refuses
        them, and ResourceError for a template without calls."""
        if self.form is None:
            raise ResourceError("the chat template writes no calls")
        answer = self._answer(calls, tools)
        return answer[self.form.start(answer) :].removesuffix(self.end or "")

    def shows_reasoning(self) -> bool:
        """Return True if the template shows the reasoning of a last message, with or without calls, from a field."""
        for calls in [{}, {"tool_calls": _CALLS[:1]}] if self.form else [{}]:
            answer = {"role": "assistant", "content": _SYSTEM, "reasoning": _RESULT, **calls}
            shown = self.messages([{"role": "user", "content": _USER}, answer])
            with suppress(EngineError):
                if _RESULT in self._template.render([(shown, False)], PROBE_TOOLS if self.form else None)[0]:
                    return True
        return False

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        name, arguments = named_arguments(call)
        shown = json.dumps(arguments, ensure_ascii=False) if self._arguments_as_text else arguments
        function = {**call["function"], "name": name, "arguments": shown}
        return {**call, "id": self._id(call["id"], name, number), "function": function}

    def _form(self, forms: Sequence[CallForm]) -> CallForm | None:
        """Return the first of the forms that the template writes, and set the arguments and ids that it reads."""
        for self._arguments_as_text, self._id in product((False, True), _IDS):
            try:
                if "Probes." not in self._rendered([], _USER):
                    return None
                answer = self._answer(_CALLS[:1], PROBE_TOOLS)
            except EngineError:
                continue
            if form := next((form for form in forms if _reads(form, answer, 1)), None):
                return form if self._keeps_messages() else None
        return None

    def _keeps_messages(self) -> bool:
        """Return True if the template shows the system message and the result also after calls."""
        try:
            before, after = self._rendered([], _SYSTEM), self._rendered(_CALLS[:1], _SYSTEM)
        except EngineError:  # without a system role
            return _RESULT in self._rendered(_CALLS[:1], _USER)
        return _RESULT in after and (_SYSTEM in after or _SYSTEM not in before)

    def _writes_both(self) -> bool:
        """Return True if the template writes both calls of a message."""
        try:
            answer = self._answer(_CALLS, PROBE_TOOLS)
        except EngineError:
            return False
        return all(name in answer for name, _ in _READ)

    def _end_of_calls(self) -> str | None:
        if self.form is None:
            return None
        try:
            after = self._rendered(_CALLS[:1], _USER).rpartition(_USER)[2]
        except EngineError:
            return None
        text = self._answer(_CALLS[:1], PROBE_TOOLS)
        after = after[max(after.find(text[self.form.start(text) :].rstrip()), 0) :]
        for match in self._special_tokens.all(after):
            if _RESULT in after[: match.start()]:
                return None
            if _reads(self.form, after[: match.start()], 1):
                if self.form.read(after[: match.start()], PROBE_TOOLS)[0].strip():
                    return None  # text after the call
                return match[0] if not self._end.endswith(match[0]) and match[0] not in self._end else None
        return None

    def _rendered(self, calls: list[dict[str, Any]], first: str) -> str:
        """Return a conversation of one question, with calls and the result of the first. first: its first message."""
        talk: Messages = [{"role": "user", "content": _USER}]
        if first == _SYSTEM:
            talk.insert(0, {"role": "system", "content": _SYSTEM})
        if calls:
            talk.append({"role": "assistant", "content": "", "tool_calls": calls})
            talk.append({"role": "tool", "content": _RESULT, "tool_call_id": calls[0]["id"]})
        return self._template.render([(self.messages(talk), False)], PROBE_TOOLS)[0]

    def _answer(self, calls: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """Return an assistant message of calls as the template writes it, without the end of the turn."""
        talk: Messages = [{"role": "user", "content": _USER}]
        talk.append({"role": "assistant", "content": "", "tool_calls": calls})
        shown = self.messages(talk)
        head, whole = self._template.render([(shown[:1], True), (shown, False)], tools)
        answer = whole.removeprefix(head) if whole.startswith(head) else whole.rpartition(_USER)[2]
        return answer.rpartition(self._end)[0] or answer


def _reads(form: CallForm, text: str, count: int) -> bool:
    """Return True if a form reads so many calls of the probe in a text."""
    try:
        return form.read(text, PROBE_TOOLS)[1] == _READ[:count]
    except (ValueError, RecursionError):
        return False


def _given_id(name: str, function: str, number: int) -> str:
    return name


def _short_id(name: str, function: str, number: int) -> str:
    """Return an id of nine letters, as Mistral's templates demand it."""
    return f"{crc32(name.encode()):09d}"[-9:]


def _numbered_id(name: str, function: str, number: int) -> str:
    """Return an id as Kimi K2 writes it: its template shows it in place of the name. number: of the calls before."""
    return f"functions.{function}:{number}"


_IDS = (_given_id, _short_id, _numbered_id)
