"""Regular expressions on model output, with a time limit: catastrophic backtracking must not block the stage. The
package `regex` checks the time while it matches, and releases the GIL for other threads (`concurrent`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import regex

from components.errors import AnswerTooCostly, Problem, SpecError

SECONDS = 1.0
"""Default time limit of a pattern on one text, in seconds."""


class Pattern:
    """Compiled pattern with a time limit. pattern: for the package `regex`, a superset of `re`. Raises SpecError if it
    is invalid."""

    def __init__(self, pattern: str, key: str = "reward.pattern", seconds: float = SECONDS):
        try:
            self._compiled = regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            message = f"{pattern!r} is no regular expression: {error}"
            raise SpecError([Problem(key, message)]) from None
        self.pattern, self.seconds = pattern, seconds

    def search(self, text: str) -> Any:
        """Return the first match, or None. Raises AnswerTooCostly on a timeout, as the other methods do."""
        return self._timed(lambda: self._compiled.search(text, timeout=self.seconds, concurrent=True))

    def fullmatch(self, text: str) -> Any:
        """Return the match of the whole text, or None."""
        return self._timed(lambda: self._compiled.fullmatch(text, timeout=self.seconds, concurrent=True))

    def count(self, text: str) -> int:
        """Return the number of non-overlapping matches."""
        return int(self._timed(lambda: sum(1 for _ in self._matches(text))))

    def _matches(self, text: str) -> Iterator[Any]:
        return iter(self._compiled.finditer(text, timeout=self.seconds, concurrent=True))

    def _timed(self, work: Any) -> Any:
        try:
            return work()
        except TimeoutError:
            message = f"the pattern {self.pattern!r} was not done after {self.seconds:g} s; make it backtrack less"
            raise AnswerTooCostly(message) from None
