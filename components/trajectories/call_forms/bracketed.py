"""Forms of tool calls in brackets: LFM2's list in Python's notation, and Mistral's `[TOOL_CALLS]NAME[ARGS]{...}`."""

from __future__ import annotations

import re

from components.trajectories.call_forms.marked import (
    Calls,
    JSONForm,
    MarkedForm,
    Tools,
    after_space,
    as_json,
    read_json,
)
from components.trajectories.call_forms.pythonic import read_pythonic


class MarkedPythonic(MarkedForm):
    """`<|tool_call_start|>[find_order(order="K482")]<|tool_call_end|>`."""

    marks = ("<|tool_call_start|>",)
    close = "<|tool_call_end|>"

    def read_calls(self, text: str, at: int, tools: Tools) -> tuple[Calls, int]:
        end = text.find(self.close, at)
        if end < 0 or not text.startswith("[", after_space(text, at)):
            raise ValueError(f"expected a list of calls and {self.close}")
        return read_pythonic(text[at:end])[1], end + len(self.close)


class MistralForm(MarkedForm):
    """`[TOOL_CALLS]` before a list of calls in JSON, or before each call as `NAME[ARGS]{...}`."""

    marks = ("[TOOL_CALLS]",)
    close = ""
    _head = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]|(?=\{))")
    _list = JSONForm(("[TOOL_CALLS]",), "", listed=True)

    def read_calls(self, text: str, at: int, tools: Tools) -> tuple[Calls, int]:
        head = self._head.match(text, at)
        if head is None:
            return self._list.read_calls(text, at, tools)
        arguments, end = read_json(text, head.end())
        return [(head["name"], as_json(arguments))], end
