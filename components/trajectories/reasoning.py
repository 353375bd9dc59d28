"""Reasoning that a model writes before its answer, between marks such as `<think>` and `</think>`.

Calls and content are read after its end only: a call that the model weighs and rejects while it reasons is none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from components.trajectories.schema import Message

MARKS = (
    ("<think>", "</think>"),
    ("<|channel>thought\n", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Start and end of reasoning, of the families that write it: Qwen, DeepSeek, GLM and most others; Gemma 4; Magistral;
Seed-OSS; Command A Reasoning."""


@dataclass(frozen=True)
class ReasoningForm:
    """Marks of a model's reasoning."""

    start: str
    end: str
    opened: bool
    """True if the prompt ends with the start mark, so that the answer begins within the reasoning."""

    def after(self, prompt: str) -> Self:
        """Return the form of the answer to a prompt. Gemma 4's prompts end with the start mark after results only."""
        return replace(self, opened=prompt.rstrip().endswith(self.start.rstrip()))

    def split(self, text: str) -> tuple[str | None, str]:
        """Return reasoning and the text after it. Reasoning without an end, such as that of a response that was cut
        off, has no text after it; a text that does not begin with reasoning is returned as it is, with None."""
        begin = self._begin(text)
        if begin is None:
            return None, text
        reasoning, _, answer = text[begin:].partition(self.end)
        return reasoning.strip("\n"), answer.lstrip("\n")

    def answer_start(self, text: str) -> int | None:
        """Return the place in a growing text at which its answer begins; None while it is, or may become, unfinished
        reasoning."""
        begin = self._begin(text)
        if begin is None:
            return None if self.start.startswith(text.lstrip()) else 0
        end = text.find(self.end, begin)
        return end + len(self.end) if end >= 0 else None

    def ranges(self, text: str) -> list[tuple[int, int]]:
        """Return the ranges [start, end) of the reasoning in a text, with the marks around it."""
        end = self.answer_start(text)
        return [(0, len(text) if end is None else end)]

    def certain(self, text: str) -> str:
        """Return the part of a growing text's reasoning that later text does not change."""
        begin = self._begin(text)
        if begin is None or (self.opened and self.start.startswith(text.lstrip())):
            return ""
        inside, closed, _ = text[begin:].partition(self.end)
        if not closed:
            inside = inside[: len(inside) - overlap(inside, self.end)]
        return inside.strip("\n")

    def write(self, reasoning: str, content: str) -> str:
        """Return an answer with its reasoning as text, for templates that have no place for it."""
        if self.start.endswith("\n"):
            return f"{self.start}{reasoning}\n{self.end}{content}"
        if self.start.startswith("["):  # Magistral
            return f"{self.start}{reasoning}{self.end}{content}"
        return f"{self.start}\n{reasoning}\n{self.end}\n\n{content}"

    def _begin(self, text: str) -> int | None:
        """Return the place at which the reasoning begins; None for a text that does not begin with it."""
        space = len(text) - len(text.lstrip())
        if text.startswith(self.start, space):
            return space + len(self.start)
        return 0 if self.opened else None


def overlap(text: str, string: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `string`."""
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)


THINK = ReasoningForm(*MARKS[0], opened=False)
"""Reasoning in the text of a message."""


def with_reasoning(message: Message, text: str) -> str:
    """Return the text of a message after its reasoning, which is written as `<think>...</think>`; without the end mark
    if the response was cut off while it reasoned."""
    if message.reasoning is None:
        return text
    ended = text.strip() or message.tool_calls or message.finish_reason not in (None, "length")
    return THINK.write(message.reasoning, text) if ended else f"{THINK.start}\n{message.reasoning}"
