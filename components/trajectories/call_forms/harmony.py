"""gpt-oss's form of answers, harmony: messages in channels, the last of them the answer or a call.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
<|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>

Reasoning is all messages of `analysis` without a recipient; content is all others, also text that is no message.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from components.trajectories.call_forms.marked import CallForm, Calls, Tools, as_json, no_number
from components.trajectories.reasoning import ReasoningForm

START = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
END, CALL = "<|end|>", "<|call|>"
_TO = r"\s*+to=(?P<{}>[^\s<]++)"
_HEAD = re.compile(
    rf"\s*+(?:{re.escape(START)})?(?:{_TO.format('before')})?\s*+<\|channel\|>(?P<channel>\w++)"
    rf"(?:{_TO.format('after')})?\s*+(?:<\|constrain\|>)?\s*+\w*+\s*+<\|message\|>"
)
_CUT_HEAD = re.compile(r"\s*+(?:<\|start\|>|<\|channel\|>)(?:(?!<\|message\|>).)*+", re.DOTALL)
"""Head of a message that is not ended."""
_RECIPIENT = re.compile(rf"(?:\A|{re.escape(START)}|<\|channel\|>\w+)\s*+to=")
"""Recipient in a head, also in one that is not ended."""
_MARK = re.compile(r"<(?=\|(?:start|channel|message|constrain|end|call|return)\|>)")
"""Special token within a text."""
_POSSIBLE_MARK = re.compile(r"<(?:\|\w*+\|?)?\Z")
"""End of a growing text that may become a special token."""
_TOOLS = "functions."


class HarmonyMessage(NamedTuple):
    """A message of an answer."""

    channel: str
    recipient: str | None
    body: str
    start: int
    """Place of its head in the answer."""
    end: int
    """Place after its end."""

    @property
    def is_reasoning(self) -> bool:
        return self.channel == "analysis" and not self.recipient


class HarmonyForm(CallForm):
    """Calls are messages to `functions.NAME`. The text of an answer with a call is dropped, as by the template. Nothing
    is called after a final message: its text may have been streamed."""

    with_text = False

    def read(self, text: str, tools: Tools = ()) -> tuple[str, Calls]:
        messages, remaining = read_messages(text)
        first = next((message for message in messages if message.recipient or message.channel == "final"), None)
        if first is None or not first.recipient:
            return self.plain(text), []
        if remaining.strip():
            raise ValueError("unexpected text after a call")
        return "", [_call(message) for message in messages if message.recipient]

    def plain(self, text: str) -> str:
        """Return the content of an answer in which nothing is called. A message to a recipient begins with `to=`: what
        cannot be called is shown as text."""
        messages, remaining = read_messages(text)
        texts = [
            f"to={message.recipient} {message.body}" if message.recipient else message.body
            for message in messages
            if not message.is_reasoning
        ]
        if not messages or remaining.strip():
            texts.append("" if _CUT_HEAD.fullmatch(remaining) else remaining)
        return _escaped("\n".join(texts))

    def attempts_call(self, text: str) -> bool:
        return _RECIPIENT.search(text) is not None

    def start(self, text: str) -> int:
        return 0

    def certain_text(self, text: str) -> str:
        """Text before a final message is undecided: it is dropped if a call follows."""
        texts: list[str] = []
        for message in read_messages(text)[0]:
            if message.recipient:
                return ""
            if message.channel == "final":
                return "\n".join([*texts, _certain_body(text, message)])
            if not message.is_reasoning:
                texts.append(_escaped(message.body))
        return ""


class HarmonyReasoning(ReasoningForm):
    """Reasoning as messages of the channel `analysis`, also between others."""

    def split(self, text: str) -> tuple[str | None, str]:
        messages, remaining = read_messages(text)
        thoughts = [message.body for message in messages if message.is_reasoning]
        answer = [text[message.start : message.end] for message in messages if not message.is_reasoning]
        return (_escaped(_joined(thoughts)) if thoughts else None), "".join([*answer, remaining])

    def ranges(self, text: str) -> list[tuple[int, int]]:
        return [(message.start, message.end) for message in read_messages(text)[0] if message.is_reasoning]

    def certain(self, text: str) -> str:
        return _joined([_certain_body(text, message) for message in read_messages(text)[0] if message.is_reasoning])

    def write(self, reasoning: str, content: str) -> str:
        return f"{self.start}{reasoning}{self.end}{START}{content}"


HARMONY_REASONING = HarmonyReasoning(ANALYSIS, END, opened=False)


def read_messages(text: str) -> tuple[list[HarmonyMessage], str]:
    """Return the messages of an answer, the last of which may be unfinished, and the text after them, which is none."""
    messages: list[HarmonyMessage] = []
    at = 0
    while head := _HEAD.match(text, at):
        ends = [(place, len(mark)) for mark in (END, CALL) if (place := text.find(mark, head.end())) >= 0]
        place, length = min(ends, default=(len(text), 0))
        recipient = head["before"] or head["after"]
        messages.append(HarmonyMessage(head["channel"], recipient, text[head.end() : place], at, place + length))
        at = place + length
    return messages, text[at:]


def _call(message: HarmonyMessage) -> tuple[str, str]:
    """Return name and arguments of a call. Raises ValueError."""
    if not message.recipient or not message.recipient.startswith(_TOOLS):
        raise ValueError(f"{message.recipient} is no tool")
    return message.recipient.removeprefix(_TOOLS), as_json(json.loads(message.body, parse_constant=no_number))


def _certain_body(text: str, message: HarmonyMessage) -> str:
    """Return the part of a message of a growing text that later text does not change."""
    ended = message.end < len(text) or text.endswith((END, CALL))
    return _escaped(message.body if ended else _POSSIBLE_MARK.sub("", message.body))


def _escaped(text: str) -> str:
    """Return a text with the special tokens in it as plain text (`< |channel|>`): templates refuse them in messages."""
    return _MARK.sub("< ", text)


def _joined(thoughts: list[str]) -> str:
    """Return bodies of messages as one reasoning."""
    return "\n".join(filter(None, (thought.strip("\n") for thought in thoughts)))
