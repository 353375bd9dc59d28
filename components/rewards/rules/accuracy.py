"""Accuracy by comparison: 1 if the answer of an episode equals the expected one, else 0.

`answer` says where the answer is (`components.rewards.rules.answers`), `expected` names the field with the expected
answer. An episode without an answer is wrong; one without the expected field is unscored.
"""

from __future__ import annotations

import math
import re
import unicodedata
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field

from components.answer_text import last_number, only_number, same_number
from components.errors import JudgeError, Problem, SpecError
from components.rewards.rules.answers import AnswerReader, as_text, check_field, field
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

_IN_NUMBERS = re.compile(
    r"(?<!\w)-(?=\.?\d)|(?<!\d)\.(?=\d)|(?<=\d),(?=\d)(?!\d{3}(?!\d))|(?<=\d)[-./:](?=\d)|(?<=\d)%"
)
"""Punctuation that belongs to a number."""


class AnswerComparison(ABC):
    """Base class of comparisons. answer: place of the answer. expected: field with the expected answer; a list holds
    several right answers, of which one is enough."""

    highest = 1.0

    def __init__(self, answer: str, expected: str):
        self._answer = AnswerReader(answer)
        check_field(expected, "reward.expected")
        self.expected = expected

    def fields_read(self) -> dict[str, str]:
        """Return the fields of the episode that are read, by configuration key."""
        return {"expected": self.expected}

    @abstractmethod
    def same(self, answer: str, expected: Any) -> bool:
        """Return True if the answer equals the expected one. Raises JudgeError if `expected` cannot be compared."""

    def __call__(self, trajectory: Trajectory) -> Score:
        expected = field(trajectory, self.expected)
        alternatives = expected if isinstance(expected, list) else [expected]
        if not alternatives or any(
            alternative is None or alternative == [] or not as_text(alternative).strip() for alternative in alternatives
        ):
            raise JudgeError(f"{self.expected} is {expected!r:.100}: nothing was expected, so no answer can be right")
        answer = self._answer.of(trajectory)
        correct = answer is not None and any(self.same(answer, alternative) for alternative in alternatives)
        expected_text = " or ".join(map(as_text, alternatives))
        explanation = (
            ""
            if correct
            else f"no answer, expected {expected_text:.100}"
            if answer is None
            else f"{answer:.100} is not {expected_text:.100}"
        )
        return Score(trajectory.id, float(correct), explanation=explanation)


@registered("reward.exact")
class Exact(AnswerComparison):
    """Equality of texts after normalization.

    Args:
        answer, expected: See `AnswerComparison`.
        case: Distinguish upper and lower case.
        space: Compare whitespace; if false, runs of whitespace count as one space, and leading and trailing ones are
            ignored.
        punctuation: Compare punctuation; if false, only that of numbers counts: signs, points, slashes, percent signs.
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

    def same(self, answer: str, expected: Any) -> bool:
        expected_text = as_text(expected)
        if normalized := self._normalized(expected_text):
            return self._normalized(answer) == normalized
        return self._normalized(answer, punctuation=True) == self._normalized(expected_text, punctuation=True)

    def _normalized(self, text: str, punctuation: bool = False) -> str:
        """Return the normalized text. punctuation: keep it, for an expected answer that is nothing else."""
        text = _nfc(text)
        if not self.case:
            text = text.casefold()
        if not self.punctuation and not punctuation:
            text = _without_punctuation(text)
        return text if self.space else " ".join(text.split())


@registered("reward.numeric")
class Numeric(AnswerComparison):
    """Equality of numbers: |answer - expected| <= max(absolute, relative · |expected|).

    A number has its sign, decimals, exponent, slash (`1/2` is 0.5) and percent sign (`50%` is 0.5); a unit may follow.
    If only the answer or only the expected number has a percent sign, `50%` also equals 50. Digits in a word, a date, a
    version or a list without spaces are no number (`components.answer_text`).

    Args:
        answer, expected: See `AnswerComparison`.
        number: `last` takes the last number of the answer, `only` counts an answer with several numbers as wrong.
        absolute, relative: Tolerances, 0 or more; `relative` refers to the expected number.
    """

    def __init__(
        self,
        answer: str = "text",
        expected: str = "answer",
        number: Literal["last", "only"] = "last",
        absolute: Annotated[float, Field(ge=0)] = 1e-6,
        relative: Annotated[float, Field(ge=0)] = 0.0,
    ):
        super().__init__(answer, expected)
        self.number = number
        self.absolute, self.relative = absolute, relative

    def same(self, answer: str, expected: Any) -> bool:
        target = expected if isinstance(expected, int | float) else last_number(as_text(expected))
        if target is None or isinstance(expected, bool) or not math.isfinite(target):
            raise JudgeError(f"what was expected, {expected!r:.100}, is no number")
        number = last_number(answer) if self.number == "last" else only_number(answer)
        return number is not None and same_number(number, target, self.absolute, self.relative)


@registered("reward.choice")
class Choice(AnswerComparison):
    """Letter of one of several choices: alone, in brackets, before its text (`B) Paris`), or after `answer`.

    If several such letters occur, the last one counts. A letter in running text does not count.

    Args:
        answer, expected: See `AnswerComparison`; `expected` is the letter, or its index in `choices`, from 0.
        choices: The letters.
    """

    def __init__(self, answer: str = "text", expected: str = "answer", choices: str = "ABCDE"):
        super().__init__(answer, expected)
        if len(choices) < 2 or not choices.isalnum() or len(set(choices.upper())) < len(choices):
            message = f"{choices!r} names no choices; expected two or more different letters, such as ABCD"
            raise SpecError([Problem("reward.choices", message)])
        self.choices = choices.upper()
        letter = f"[{self.choices}{self.choices.lower()}]"
        self._alone = re.compile(rf"\W*({letter})\W*")
        self._marked = re.compile(
            rf"\(({letter})\)|^[^\w\n]*+({letter})[).:](?!\w)"
            rf"|\b(?:answer|option|choice)(?: is| would be)?\W{{0,4}}({letter})\b(?!['’])",
            re.IGNORECASE | re.MULTILINE,
        )

    def same(self, answer: str, expected: Any) -> bool:
        if isinstance(expected, int) and not isinstance(expected, bool) and 0 <= expected < len(self.choices):
            letter = self.choices[expected]
        elif isinstance(expected, str) and len(expected.strip()) == 1 and expected.strip().upper() in self.choices:
            letter = expected.strip().upper()
        else:
            raise JudgeError(f"what was expected, {expected!r:.100}, is none of the choices {self.choices}")
        return self.chosen(answer) == letter

    def chosen(self, text: str) -> str | None:
        """Return the chosen letter, or None."""
        if alone := self._alone.fullmatch(text):
            return alone[1].upper()
        marked = [next(filter(None, groups)) for groups in self._marked.findall(text)]
        return marked[-1].upper() if marked else None


def _without_punctuation(text: str) -> str:
    """Return the text without punctuation, except for what belongs to a number; thousands separators do not."""
    protected = {at for match in _IN_NUMBERS.finditer(text) for at in range(*match.span())}
    return "".join(
        character
        for at, character in enumerate(text)
        if at in protected or not unicodedata.category(character).startswith("P")
    )


def _nfc(text: str) -> str:
    """Return the text in Unicode's form NFC. A text with more than 30 combining marks in a row is no natural language
    (Unicode's Stream-Safe Text Format), takes quadratic time to normalise, and is returned as it is."""
    run = 0
    for character in "" if text.isascii() else text:
        run = run + 1 if unicodedata.combining(character) else 0
        if run > 30:
            return text
    return unicodedata.normalize("NFC", text)
