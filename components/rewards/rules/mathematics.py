"""Accuracy of mathematics: 1 where the answer and the expected one are the same expression, by math-verify.

`1/2`, `0.5` and `\\frac{1}{2}` are the same, and so are sets, intervals, matrices and equations written differently.
Reading an expression and comparing it can take for ever on what a model writes; so it is done in a process beside this
one, and what takes too long is wrong: the episode is scored 0 and the explanation says so. An expected answer that
cannot be read leaves it unscored.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import Field

from components.errors import AnswerTooCostly, JudgeError, ResourceError
from components.rewards.rules.accuracy import Comparison
from components.rewards.rules.answers import as_text
from components.rewards.worker_process import WorkerProcess
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory


@registered("reward.math")
class Mathematics(Comparison):
    """The same expression, by math-verify.

    Args:
        answer, expected: See `components.rewards.rules.accuracy`. Of an answer that is text, math-verify takes what is
        boxed, or else the last expression. digits: Decimal digits to which floats are compared. seconds: Of CPU time
        that one comparison may take.

    Raises ResourceError where math-verify is not installed.
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
            raise ResourceError("this reward needs the package math-verify: pip install 'espalier[math]'")
        self.digits = digits
        self._same = WorkerProcess("components.rewards.rules.mathematics:verified", seconds, ["math_verify"])

    def same(self, given: str, expected: Any) -> bool:
        found = self._same(given=given, expected=as_text(expected), digits=self.digits)
        if found is None:
            raise JudgeError(f"what was expected, {expected!r:.100}, cannot be read as mathematics")
        return bool(found)

    def __call__(self, trajectory: Trajectory) -> Score:
        try:
            return super().__call__(trajectory)
        except AnswerTooCostly as error:
            return Score(trajectory.id, 0.0, explanation=f"the answer could not be compared: {error}")


def verified(given: str, expected: str, digits: int) -> bool | None:
    """Whether both are the same; None where `expected` cannot be read. Its time is limited by whoever calls it: the
    limits of math-verify are alarms, which only a main thread can have."""
    from math_verify import parse, verify

    right = parse(_marked(expected), parsing_timeout=None)
    if not right:
        return None
    found = parse(given, parsing_timeout=None)
    return bool(verify(right, found, float_rounding=digits, timeout_seconds=None))


def _marked(text: str) -> str:
    """All of it as one expression: LaTeX is read between dollars only."""
    return text if "$" in text or "\\boxed" in text or not text.strip() else f"${text}$"
