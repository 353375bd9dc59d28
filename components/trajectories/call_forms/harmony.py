"""gpt-oss's form of answers, harmony: messages in channels, the last of them the answer or a call.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
<|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>
"""

from __future__ import annotations

import json
import re

from components.trajectories.call_forms.marked import CallForm, Calls, Tools, as_json, no_number, overlap
from components.trajectories.reasoning import ReasoningForm

START = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
END, CALL = "<|end|>", "<|call|>"
_TO = r"\s*+to=(?P<{}>[^\s<]++)"
_HEAD = re.compile(
    rf"(?:{re.escape(START)})?(?:{_TO.format('before')})?\s*+<\|channel\|>(?P<channel>\w++)(?:{_TO.format('after')})?"
    r"\s*+(?:<\|constrain\|>)?\s*+\w*+\s*+<\|message\|>"
)
_TOOLS = "functions."


class HarmonyForm(CallForm):
    """Calls are messages to `functions.NAME`. The text of an answer with a call is dropped, as by the template."""

    with_text = False

    def read(self, text: str, tools: Tools = ()) -> tuple[str, Calls]:
        calls: Calls = []
        texts: list[str] = []
        at = 0
        while head := _HEAD.match(text, at):
            body, at = _body(text, head.end())
            recipient = head["before"] or head["after"]
            if recipient and recipient.startswith(_TOOLS):
                arguments = json.loads(body, parse_constant=no_number)
                calls.append((recipient.removeprefix(_TOOLS), as_json(arguments)))
            elif head["channel"] != "analysis":
                texts.append(body)
        if at == 0:
            return text, []
        return "" if calls else "\n".join(texts), calls

    def plain(self, text: str) -> str:
        head = _HEAD.match(text)
        return _body(text, head.end())[0] if head else text

    def start(self, text: str) -> int:
        return 0

    def certain_text(self, text: str) -> str:
        head = _HEAD.match(text)
        if head is None or head["channel"] != "final" or head["before"] or head["after"]:
            return ""
        body, end = _body(text, head.end())
        return body if end < len(text) else body[: len(body) - max(overlap(body, mark) for mark in (END, CALL))]


class HarmonyReasoning(ReasoningForm):
    """Reasoning as messages of the channel `analysis`."""

    def write(self, reasoning: str, content: str) -> str:
        return f"{self.start}{reasoning}{self.end}{START}{content}"


HARMONY_REASONING = HarmonyReasoning(ANALYSIS, END, opened=False)


def _body(text: str, at: int) -> tuple[str, int]:
    """Return the text of a message that begins at `at`, and the place after its end."""
    ends = [(place, len(mark)) for mark in (END, CALL) if (place := text.find(mark, at)) >= 0]
    place, length = min(ends, default=(len(text), 0))
    return text[at:place], place + length
