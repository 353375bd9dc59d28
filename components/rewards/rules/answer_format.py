"""How an answer is written: a pattern that it must match, or tags that it must have."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Literal

from pydantic import Field

from components.errors import AnswerTooCostly, Problem, SpecError
from components.rewards.rules.answers import Answer, last_text, said
from components.rewards.rules.patterns import Pattern
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory


@registered("reward.pattern")
class Matches:
    """1 where a regular expression matches the answer, else 0.

    Args:
        pattern: Of the package `regex`, which reads all that `re` reads.
        answer: Where the answer stands (`components.rewards.rules.answers`).
        whole: Whether all of the answer must match, or some place in it.
        seconds: That one match may take; what takes longer is no match.
    """

    def __init__(
        self,
        pattern: str,
        answer: str = "text",
        whole: bool = False,
        seconds: Annotated[float, Field(gt=0, le=600)] = 1.0,
    ):
        self._answer = Answer(answer)
        self._pattern = Pattern(pattern, seconds=seconds)
        self.whole = whole

    def __call__(self, trajectory: Trajectory) -> Score:
        text = self._answer.of(trajectory)
        find = self._pattern.fullmatch if self.whole else self._pattern.search
        try:
            found = text is not None and find(text) is not None
        except AnswerTooCostly as error:
            return Score(trajectory.id, 0.0, explanation=str(error))
        return Score(
            trajectory.id, float(found), explanation="" if found else "no answer" if text is None else "no match"
        )


@registered("reward.format")
class Tags:
    """1 where a message is these tags, each once, in this order, and nothing but blanks outside of them.

    Args:
        tags: Names: [think, answer] asks for <think>…</think><answer>…</answer>.
        of: `last` message, or `all` that the agent sampled; then the reward is the share of those that are so.
        filled: Whether each must hold something.
    """

    def __init__(
        self,
        tags: Annotated[list[str], Field(min_length=1)],
        of: Literal["last", "all"] = "last",
        filled: bool = True,
    ):
        wrong = [tag for tag in tags if not re.fullmatch(r"[\w-]+", tag)]
        if wrong or len(set(tags)) < len(tags):
            what = f"{wrong[0]!r} is no name of a tag" if wrong else f"{tags} names a tag twice"
            raise SpecError([Problem("reward.tags", f"{what}; expected names such as think, each once")])
        self.tags, self.of, self.filled = list(tags), of, filled

    def __call__(self, trajectory: Trajectory) -> Score:
        texts = [last_text(trajectory)] if self.of == "last" else [message.content for message in said(trajectory)]
        wrong = [why for text in texts if (why := self.wrong(text))]
        share = 1.0 - len(wrong) / len(texts) if texts else 0.0
        return Score(trajectory.id, share, explanation=wrong[0] if wrong else "")

    def wrong(self, text: str) -> str:
        """What keeps a text from being written so; empty where nothing does."""
        rest = text
        for tag in self.tags:
            before, opened, rest = rest.partition(f"<{tag}>")
            inside, closed, rest = rest.partition(f"</{tag}>")
            if not opened or not closed:
                return f"<{tag}> is missing, not closed, or not in its place"
            if before.strip():
                return f"text before <{tag}>"
            if self.filled and _blank(inside):
                return f"<{tag}> is empty"
            if nested := [one for one in self.tags if f"<{one}>" in inside or f"</{one}>" in inside]:
                return f"<{nested[0]}> inside of <{tag}>"
        return "text after the last tag" if rest.strip() else ""


def _blank(text: str) -> bool:
    """Whether a text shows nothing: blanks, and characters such as U+200B that have no width."""
    return all(unicodedata.category(character)[0] in "ZC" for character in text)
