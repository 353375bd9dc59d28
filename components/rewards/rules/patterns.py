"""Regular expressions against what a model wrote, with a limit of time: a pattern that backtracks without end on text
that nobody foresaw must not hold up the stage. The package `regex` looks at the clock while it matches, and
lets other threads run (`concurrent`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import regex

from components.errors import AnswerTooCostly, Problem, SpecError

SECONDS = 1.0
"""That a pattern may take on one text."""


class Pattern:
    """pattern: of the package `regex`, which reads all that `re` reads. Raises SpecError where it is none."""

    def __init__(self, pattern: str, key: str = "reward.pattern", seconds: float = SECONDS):
        try:
            self._compiled = regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            message = f"{pattern!r} is no regular expression: {error}"
            raise SpecError([Problem(key, message)]) from None
        self.pattern, self.seconds = pattern, seconds

    def search(self, text: str) -> Any:
        """The first match, or None. Raises AnswerTooCostly where the time is up; so do the others."""
        return self._timed(lambda: self._compiled.search(text, timeout=self.seconds, concurrent=True))

    def fullmatch(self, text: str) -> Any:
        """The match of the whole text, or None."""
        return self._timed(lambda: self._compiled.fullmatch(text, timeout=self.seconds, concurrent=True))

    def count(self, text: str) -> int:
        """Matches that do not overlap."""
        return int(self._timed(lambda: sum(1 for _ in self._found(text))))

    def _found(self, text: str) -> Iterator[Any]:
        return iter(self._compiled.finditer(text, timeout=self.seconds, concurrent=True))

    def _timed(self, work: Any) -> Any:
        try:
            return work()
        except TimeoutError:
            message = f"the pattern {self.pattern!r} was not done after {self.seconds:g} s; make it backtrack less"
            raise AnswerTooCostly(message) from None
