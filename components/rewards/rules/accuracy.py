"""Accuracy by comparison: 1 where the answer of an episode is the expected one, else 0.

The answer is where `answer` says (`components.rewards.rules.answers`), what was expected in the field `expected`. An
episode without an answer is wrong; one without the expected field is unscored.
"""

from __future__ import annotations

import math
import re
import unicodedata
from abc import ABC, abstractmethod
from typing import Annotated, Any

from pydantic import Field

from components.errors import JudgeError, Problem, SpecError
from components.rewards.rules.answers import Answer, as_text, check_field, field
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

_NUMBER = re.compile(r"(?:(?<![\w.)])[-+−])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


class Comparison(ABC):
    """answer: where the answer stands. expected: field that holds what was expected; a list names several right
    answers, of which one is enough."""

    def __init__(self, answer: str, expected: str):
        self._answer = Answer(answer)
        check_field(expected, "reward.expected")
        self.expected = expected

    def fields_read(self) -> dict[str, str]:
        """Fields of the episode that are read, by key."""
        return {"expected": self.expected}

    @abstractmethod
    def same(self, given: str, expected: Any) -> bool:
        """Raises JudgeError where `expected` is nothing that can be compared with."""

    def __call__(self, trajectory: Trajectory) -> Score:
        expected = field(trajectory, self.expected)
        several = expected if isinstance(expected, list) else [expected]
        if not several or any(one is None or one == [] or not as_text(one).strip() for one in several):
            raise JudgeError(f"{self.expected} is {expected!r:.100}: nothing was expected, so no answer can be right")
        given = self._answer.of(trajectory)
        right = given is not None and any(self.same(given, one) for one in several)
        wanted = " or ".join(map(as_text, several))
        why = (
            ""
            if right
            else f"no answer, expected {wanted:.100}"
            if given is None
            else f"{given:.100} is not {wanted:.100}"
        )
        return Score(trajectory.id, float(right), explanation=why)


@registered("reward.exact")
class Exact(Comparison):
    """The same text, after what does not count is taken out of both.

    Args:
        answer, expected: See `Comparison`.
        case: Whether upper and lower case count.
        space: Whether blanks count; if not, one of any kind is as good as several, and none are needed at the ends.
        punctuation: Whether punctuation counts.
    """

    def __init__(
        self,
        answer: str = "text",
        expected: str = "answer",
        case: bool = False,
        space: bool = False,
        punctuation: bool = True,
    ):
        super().__init__(answer, expected)
        self.case, self.space, self.punctuation = case, space, punctuation

    def same(self, given: str, expected: Any) -> bool:
        right = as_text(expected)
        if wanted := self._plain(right):
            return self._plain(given) == wanted
        return self._plain(given, punctuation=True) == self._plain(right, punctuation=True)

    def _plain(self, text: str, punctuation: bool = False) -> str:
        """Take out what does not count. punctuation: keeps it, for an expected answer that is nothing else."""
        text = _composed(text)
        if not self.case:
            text = text.casefold()
        if not self.punctuation and not punctuation:
            text = "".join(one for one in text if not unicodedata.category(one).startswith("P"))
        return text if self.space else " ".join(text.split())


@registered("reward.numeric")
class Numeric(Comparison):
    """|given - expected| <= max(absolute, relative · |expected|), the tolerance being of the expected number.

    The last number of the answer counts; commas between thousands are read over, and so are units and signs around it.

    Args:
        answer, expected: See `Comparison`.
        absolute, relative: Tolerances, 0 or more.
    """

    def __init__(
        self,
        answer: str = "text",
        expected: str = "answer",
        absolute: Annotated[float, Field(ge=0)] = 1e-6,
        relative: Annotated[float, Field(ge=0)] = 0.0,
    ):
        super().__init__(answer, expected)
        self.absolute, self.relative = absolute, relative

    def same(self, given: str, expected: Any) -> bool:
        right = expected if isinstance(expected, int | float) else last_number(as_text(expected))
        if right is None or isinstance(expected, bool) or not math.isfinite(right):
            raise JudgeError(f"what was expected, {expected!r:.100}, is no number")
        found = last_number(given)
        return found is not None and abs(found - right) <= max(self.absolute, self.relative * abs(right))


@registered("reward.choice")
class Choice(Comparison):
    """The letter of one of several choices: alone, in brackets, before its text (`B) Paris`), or after `answer`. Of
    several, the last one that is written so counts. A letter in running text is none.

    Args:
        answer, expected: See `Comparison`; expected is the letter, or its place in `choices` as a number from 0.
        choices: The letters.
    """

    def __init__(self, answer: str = "text", expected: str = "answer", choices: str = "ABCDE"):
        super().__init__(answer, expected)
        if len(choices) < 2 or not choices.isalnum() or len(set(choices.upper())) < len(choices):
            message = f"{choices!r} names no choices; expected two or more different letters, such as ABCD"
            raise SpecError([Problem("reward.choices", message)])
        self.choices = choices.upper()
        one = f"[{self.choices}{self.choices.lower()}]"
        self._alone = re.compile(rf"\W*({one})\W*")
        self._marked = re.compile(
            rf"\(({one})\)|^[^\w\n]*+({one})[).:](?!\w)"
            rf"|\b(?:answer|option|choice)(?: is| would be)?\W{{0,4}}({one})\b(?!['’])",
            re.IGNORECASE | re.MULTILINE,
        )

    def same(self, given: str, expected: Any) -> bool:
        if isinstance(expected, int) and not isinstance(expected, bool) and 0 <= expected < len(self.choices):
            right = self.choices[expected]
        elif isinstance(expected, str) and len(expected.strip()) == 1 and expected.strip().upper() in self.choices:
            right = expected.strip().upper()
        else:
            raise JudgeError(f"what was expected, {expected!r:.100}, is none of the choices {self.choices}")
        return self.chosen(given) == right

    def chosen(self, text: str) -> str | None:
        """The letter, or None."""
        if alone := self._alone.fullmatch(text):
            return alone[1].upper()
        marked = [next(filter(None, found)) for found in self._marked.findall(text)]
        return marked[-1].upper() if marked else None


def _composed(text: str) -> str:
    """Return the text in Unicode's form NFC. A text with more than 30 combining marks in a row is no natural language
    (Unicode's Stream-Safe Text Format), takes quadratic time to normalise, and is returned as it is."""
    run = 0
    for character in "" if text.isascii() else text:
        run = run + 1 if unicodedata.combining(character) else 0
        if run > 30:
            return text
    return unicodedata.normalize("NFC", text)


def last_number(text: str) -> float | None:
    """The last number in a text."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("−", "-")) if found else None
