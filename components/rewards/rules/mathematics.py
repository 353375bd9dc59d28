"""Accuracy of mathematical answers: 1 if math-verify finds the answer equal to the expected one, else 0.

`1/2`, `0.5` and `\\frac{1}{2}` are equal, and so are sets, intervals, matrices and equations in different notations.
Parsing and comparing a model's expression can take forever, so it runs in a subprocess. A comparison that exceeds its
time limit counts as wrong: the score is 0 and the explanation states the reason. If the expected answer is no
mathematics (`Paris`), the episode is unscored.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from string import ascii_lowercase
from typing import Annotated, Any

from pydantic import Field

from components.errors import AnswerTooCostly, JudgeError, ResourceError
from components.rewards.answer_worker import AnswerWorker
from components.rewards.rules.accuracy import AnswerComparison
from components.rewards.rules.answers import as_text
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox|boxed)\s*\{([^{}]*)\}")
_WORDS_ONLY = re.compile(r"[^\W\d_][^\d_=+*/^<>\\{}|]*")
_WORD = re.compile(r"[^\W\d_]{3,}")
_NAMES = "sin cos tan cot sec csc log exp sqrt lim max min gcd lcm mod det inf infinity alpha beta gamma theta"


@registered("reward.math")
class Mathematics(AnswerComparison):
    """Equality of mathematical expressions, by math-verify.

    Args:
        answer, expected: See `components.rewards.rules.accuracy`. In an answer that is text, math-verify takes the
            boxed expression, or else the last one.
        digits: Decimal digits to which floats are compared.
        seconds: CPU time limit of one comparison.

    Raises ResourceError if math-verify is not installed.
    """

    def __init__(
        self,
        answer: str = "text",
        expected: str = "answer",
        digits: Annotated[int, Field(ge=1, le=30)] = 6,
        seconds: Annotated[float, Field(gt=0, le=600)] = 5.0,
    ):
        super().__init__(answer, expected)
        if find_spec("math_verify") is None:
            raise ResourceError("this reward needs the package math-verify: pip install -e '.[math]'")
        self.digits = digits
        self._same = AnswerWorker("components.rewards.rules.mathematics:verified", seconds, ["math_verify"])

    def same(self, answer: str, expected: Any) -> bool:
        equal = self._same(answer=answer, expected=as_text(expected), digits=self.digits)
        if equal is None:
            raise JudgeError(f"what was expected, {expected!r:.100}, cannot be read as mathematics")
        return bool(equal)

    def __call__(self, trajectory: Trajectory) -> Score:
        try:
            return super().__call__(trajectory)
        except AnswerTooCostly as error:
            return Score(trajectory.id, 0.0, explanation=f"the answer could not be compared: {error}")


def verified(answer: str, expected: str, digits: int) -> bool | None:
    """Return True if both expressions are equal; None if `expected` cannot be parsed. The caller limits the time: the
    limits of math-verify are alarms, which work only in a main thread."""
    from math_verify import parse, verify

    target = None if _is_prose(expected) else parse(_marked(expected), parsing_timeout=None)
    if not target:
        return None
    parsed = parse(answer, parsing_timeout=None)
    return bool(verify(target, parsed, float_rounding=digits, timeout_seconds=None))


def _is_prose(text: str) -> bool:
    """Return True for words, which math-verify reads as products of letters: a text without digits and operators that
    has a word of three or more letters, other than a function, a constant or letters in alphabetical order."""
    bare = _TEXT_COMMAND.sub(r"\1", text.replace("$", "")).strip()
    words = _WORD.findall(bare) if _WORDS_ONLY.fullmatch(bare) else []
    return any(word.lower() not in _NAMES.split() and word.lower() not in ascii_lowercase for word in words)


def _marked(text: str) -> str:
    """Return the text marked as one expression: LaTeX is parsed only between dollar signs."""
    return text if "$" in text or "\\boxed" in text or not text.strip() else f"${text}$"
