"""Values of a thumb over the rows of an import: two, because a third, such as 0 between -1 and 1, is neither good nor
bad and would be trained on as one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.data.columns import as_number
from components.data.forms.base import Form
from components.errors import Problem

_MOST = 4
_LONGEST = 40


class ThumbValues:
    """Distinct values of the thumb of a form; none for a form without one."""

    def __init__(self, form: Form, mapped: Mapping[str, str]):
        self._form, self._mapped = form, mapped
        self._values: dict[str, str] = {}
        """Values as text, by what they mean: `1`, `1.0` and true are one value."""
        self._column = ""

    def add(self, values: Mapping[str, Any]) -> None:
        """Count the thumb of a row."""
        column = self._form.reading(values, self._mapped) if self._form.thumb and len(self._values) < _MOST else {}
        for name, ours in column.items():
            if ours == self._form.thumb:
                number = as_number(values[name])
                text = str(values[name]).strip()[:_LONGEST]
                self._values.setdefault(f"{number:g}" if number is not None else text.lower(), text)
                self._column = name

    def problem(self, path: str = "data") -> Problem | None:
        """Return the problem of more than two values; None without it. path: key of the spec."""
        if len(self._values) <= 2:
            return None
        shown = ", ".join(map(repr, self._values.values())) + (", …" if len(self._values) == _MOST else "")
        return Problem(
            f"{path}.columns",
            f"label: the column {self._column!r} has more than two values ({shown}); expected two, good and bad. Leave "
            f"out the rows between, or train on scores: {path}.form=prompt_completion "
            f"'{path}.columns={{reward: {self._column}}}'",
        )
