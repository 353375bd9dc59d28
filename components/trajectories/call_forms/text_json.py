"""Llama 3's form of tool calls: the answer is a JSON object `{"name": ..., "parameters": {...}}`, or several of them
joined by semicolons or white space, after an optional `<|python_tag|>`."""

from __future__ import annotations

import re

from components.trajectories.call_forms.marked import CallForm, Calls, Tools, after_space, as_json, read_json
from components.trajectories.reasoning import overlap

TAG = "<|python_tag|>"
_START = re.compile(rf'\s*+(?:{re.escape(TAG)}|\{{\s*+"name"\s*+:\s*+"[^"]*+"\s*+,\s*+"(?:parameters|arguments)")')
"""Start of an answer that is meant as a call."""


class JSONText(CallForm):
    """An answer that is a call has no other text, so an answer with text around an object is no call. Neither is an
    object without name and parameters, such as an answer in JSON, nor any object where no tools are offered."""

    with_text = False

    def read(self, text: str, tools: Tools = ()) -> tuple[str, Calls]:
        at = after_space(text, 0)
        tagged = text.startswith(TAG, at)
        if not tools or not (tagged or text.startswith("{", at)):
            return text, []
        at = at + len(TAG) if tagged else at
        calls: Calls = []
        while True:
            call, at = read_json(text, at)
            if not isinstance(call, dict) or not isinstance(call.get("name"), str) or len(call) != 2:
                raise ValueError("a call has a name and parameters")
            arguments = call.get("parameters", call.get("arguments"))
            calls.append((call["name"], as_json(arguments)))
            at = after_space(text, at)
            if at == len(text):
                return "", calls
            at += text[at] == ";"

    def attempts_call(self, text: str) -> bool:
        return _START.match(text) is not None

    def start(self, text: str) -> int:
        return min((place for mark in (TAG, "{") if (place := text.find(mark)) >= 0), default=len(text))

    def certain_text(self, text: str) -> str:
        begin = after_space(text, 0)
        ending = text[begin:]
        undecided = not ending or ending.startswith(("{", TAG)) or overlap(ending, TAG) == len(ending)
        return "" if undecided else text
