"""Columns of a row by the names that a form uses for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from components.data.examples import RowProblem

OPTIONAL: dict[str, tuple[str, ...]] = {
    "id": ("task_id", "id", "item_id", "uid"),
    "type": ("type", "task_type", "category"),
    "difficulty": ("difficulty",),
    "reward": ("reward", "final_reward", "weight", "score"),
    "system": ("system",),
    "tools": ("tools",),
}
"""Columns that every form reads where they exist: our names, and the names that they commonly have."""


class RowColumns:
    """Values of one row by our names of the columns.

    A column is looked up under the name that the user maps it to, else under its common names. A value of None is
    absent, because tables fill missing values with it.
    """

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, tuple[str, ...]], mapped: Mapping[str, str]):
        self._values = values
        self._names = {**OPTIONAL, **names}
        self._mapped = mapped
        self._used: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the value of a column; None if it is absent. Raises RowProblem if the user maps it to a column that
        the row lacks."""
        if name in self._mapped and self._mapped[name] not in self._values:
            raise RowProblem(f"there is no column {self._mapped[name]!r}, which data.columns.{name} names")
        theirs = self.source(name)
        if theirs is None:
            return None
        self._used.add(theirs)
        return self._values[theirs]

    def source(self, name: str) -> str | None:
        """Return the name in the row of a column with a value; None if it is absent."""
        names = (self._mapped[name],) if name in self._mapped else self._names[name]
        return next((theirs for theirs in names if self._values.get(theirs) is not None), None)

    def need(self, name: str) -> Any:
        """Return the value of a column. Raises RowProblem if it is absent."""
        value = self.get(name)
        if value is None:
            raise RowProblem(f"column {self._shown(name)} is missing")
        return value

    def text(self, name: str) -> str:
        """Return a text. Raises RowProblem if it is absent, not text, or empty."""
        value = self.need(name)
        if isinstance(value, bool | int | float):
            return str(value)
        if not isinstance(value, str):
            raise RowProblem(f"column {self._shown(name)}: expected text, got {kind_of(value)}")
        if not value.strip():
            raise RowProblem(f"column {self._shown(name)} is empty", "empty")
        return value

    def items(self, name: str) -> list[Any]:
        """Return a list; text is parsed as JSON. Raises RowProblem if it is absent, no list, or empty."""
        value = parsed(self.need(name))
        if not isinstance(value, list):
            raise RowProblem(f"column {self._shown(name)}: expected a list, got {kind_of(value)}")
        if not value:
            raise RowProblem(f"column {self._shown(name)} is an empty list", "empty")
        return value

    def numbers(self, name: str) -> list[float]:
        """Return a list of finite numbers. Raises RowProblem as `items`."""
        values = [as_number(value) for value in self.items(name)]
        if any(value is None for value in values):
            raise RowProblem(f"column {self._shown(name)}: expected finite numbers")
        return [value for value in values if value is not None]

    def number(self, name: str) -> float | None:
        """Return an optional number; None if absent. Raises RowProblem for another value. Under their common names, an
        empty text is absent (as in CSV), and so is a difficulty in words."""
        value = self.get(name)
        number = as_number(value)
        absent = value is None or (name not in self._mapped and (value == "" or name == "difficulty"))
        if number is None and not absent:
            reason = f"expected a finite number, got {kind_of(value)}; data.ignore leaves the column out"
            raise RowProblem(f"column {self.source(name)!r}: {reason}", fits=True)
        return number

    def label(self, name: str) -> str:
        """Return an optional short text such as an id or a type; empty if absent or neither text nor number."""
        value = self.get(name)
        return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""

    def unread(self) -> dict[str, Any]:
        """Return the columns that were not read."""
        return {name: value for name, value in self._values.items() if name not in self._used and value is not None}

    def _shown(self, name: str) -> str:
        return repr(self._mapped.get(name, name))


def parsed(value: Any) -> Any:
    """Return a value of a text column as the JSON list or object that it holds, if it holds one."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def as_number(value: Any) -> float | None:
    """Return a finite number; text is converted. None for anything else."""
    if isinstance(value, bool | int | float | str):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return None
        return number if math.isfinite(number) else None
    return None


def kind_of(value: Any) -> str:
    """Return the kind of JSON value, for messages."""
    return {dict: "an object", list: "a list", str: "text", bool: "true or false"}.get(type(value), "a number")
