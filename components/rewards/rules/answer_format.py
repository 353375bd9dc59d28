"""Format rewards: a pattern that the answer matches, or tags that it contains."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Literal

from pydantic import Field

from components.errors import AnswerTooCostly, Problem, SpecError
from components.rewards.rules.answers import AnswerReader, agent_messages, last_message, text_with_reasoning
from components.rewards.rules.patterns import Pattern
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

_INVISIBLE = "\u115f\u1160\u2800\u3164\uffa0"
"""Characters without a glyph that Unicode counts as letters or symbols: the fillers of Hangul, and the empty Braille
pattern."""


@registered("reward.pattern")
class Matches:
    """Match of a regular expression: 1 if it matches the answer, else 0.

    Args:
        pattern: Regular expression of the package `regex`, a superset of `re`.
        answer: Place of the answer (`components.rewards.rules.answers`).
        whole: If true, the whole answer must match; else any part of it.
        seconds: Time limit of one match; a timeout counts as no match.
    """

    def __init__(
        self,
        pattern: str,
        answer: str = "text",
        whole: bool = False,
        seconds: Annotated[float, Field(gt=0, le=600)] = 1.0,
    ):
        self._answer = AnswerReader(answer)
        self._pattern = Pattern(pattern, seconds=seconds)
        self.whole = whole

    def __call__(self, trajectory: Trajectory) -> Score:
        text = self._answer.of(trajectory)
        find = self._pattern.fullmatch if self.whole else self._pattern.search
        try:
            matched = text is not None and find(text) is not None
        except AnswerTooCostly as error:
            return Score(trajectory.id, 0.0, explanation=str(error))
        return Score(
            trajectory.id, float(matched), explanation="" if matched else "no answer" if text is None else "no match"
        )


@registered("reward.format")
class Tags:
    """Tag format: 1 if a message consists of these tags, each once, in this order, and only whitespace outside.

    Args:
        tags: Names: [think, answer] requires <think>…</think><answer>…</answer>. The reasoning of a message is the
            content of `think`.
        of: `last` message, or `all` sampled messages; then the reward is the share of well-formed ones.
        filled: Require content in each tag.
    """

    def __init__(
        self,
        tags: Annotated[list[str], Field(min_length=1)],
        of: Literal["last", "all"] = "last",
        filled: bool = True,
    ):
        invalid = [tag for tag in tags if not re.fullmatch(r"[\w-]+", tag)]
        if invalid or len(set(tags)) < len(tags):
            message = f"{invalid[0]!r} is no name of a tag" if invalid else f"{tags} names a tag twice"
            raise SpecError([Problem("reward.tags", f"{message}; expected names such as think, each once")])
        self.tags, self.of, self.filled = list(tags), of, filled

    def __call__(self, trajectory: Trajectory) -> Score:
        messages = [last_message(trajectory)] if self.of == "last" else agent_messages(trajectory)
        texts = [text_with_reasoning(message) if "think" in self.tags else message.content for message in messages]
        errors = [error for text in texts if (error := self.wrong(text))]
        share = 1.0 - len(errors) / len(texts) if texts else 0.0
        return Score(trajectory.id, share, explanation=errors[0] if errors else "")

    def wrong(self, text: str) -> str:
        """Return the format error of a text; empty if there is none."""
        remaining = text
        for tag in self.tags:
            before, opened, remaining = remaining.partition(f"<{tag}>")
            inside, closed, remaining = remaining.partition(f"</{tag}>")
            if not opened or not closed:
                return f"<{tag}> is missing, not closed, or not in its place"
            if not _blank(before):
                return f"text before <{tag}>"
            if self.filled and _blank(inside):
                return f"<{tag}> is empty"
            if nested := [other for other in self.tags if f"<{other}>" in inside or f"</{other}>" in inside]:
                return f"<{nested[0]}> inside of <{tag}>"
        return "" if _blank(remaining) else "text after the last tag"


def _blank(text: str) -> bool:
    """Return True if a text is invisible: whitespace, and characters without a glyph, such as U+200B, U+3164 or a
    combining mark with nothing to combine with."""
    return all(unicodedata.category(character)[0] in "ZCM" or character in _INVISIBLE for character in text)
