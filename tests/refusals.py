"""Tables of invalid settings: each is refused in words of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from components.errors import SpecError


def wrong_refusals(
    cases: Iterable[tuple[Any, str]], attempt: Callable[[Any], object], error: type[Exception] = SpecError
) -> list[tuple[Any, str, str]]:
    """Return the cases (argument of `attempt`, pattern of its error) that are accepted or refused in other words, with
    what was said."""
    wrong = []
    for case, pattern in cases:
        said = "accepted"
        try:
            attempt(case)
        except error as refusal:
            said = str(refusal)
            if re.search(pattern, said):
                continue
        wrong.append((case, pattern, said))
    return wrong


def wrong_problems(
    cases: Iterable[tuple[Any, str, str]], attempt: Callable[[Any], object]
) -> list[tuple[Any, str, str]]:
    """Return the same of cases whose error names a key: (argument of `attempt`, key, pattern of what is said of it)."""
    return wrong_refusals([(case, rf"(?<![\w.]){re.escape(key)}: .*{words}") for case, key, words in cases], attempt)
