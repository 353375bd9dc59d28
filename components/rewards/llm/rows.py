"""Rows of a judge's answer, each under one of the requested names.

The schema requires each name as a key, so that a judge that is held to it cannot leave one out. Lists of rows with
their names are accepted as well, and names that a judge wrote differently where it is clear which one is meant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from components.rewards.llm.question import InvalidAnswer

Row = dict[str, Any]
MOST = 20
"""Maximum number of names in one correction."""
_QUOTES = " \t\n\"'`"


def check_names(names: Iterable[str], reserved: Sequence[str]) -> None:
    """Raise ValueError for a name that a row cannot have. reserved: names of the judge's other figures."""
    if invalid := [name for name in names if name in reserved or not name.replace("-", "_").isidentifier()]:
        raise ValueError(
            f"names of letters, digits, - and _, other than {', '.join(reserved)}; got {', '.join(invalid)}"
        )


def rows_schema(names: Sequence[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with one row for each name. fields: schemas of a row's fields."""
    return object_schema(dict.fromkeys(names, object_schema(fields)))


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these properties, all of them required."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def rows_example(names: Sequence[str], row: str) -> str:
    """Return the form of the answer for a prompt: the row for each name. row: description of a row, as JSON."""
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {row}" for name in names) + "}"


def by_name(
    answer: Any, names: Sequence[str], key: str, value: str, called: str
) -> tuple[dict[str, Row], dict[str, list[str]]]:
    """Return the first row of each name, in the order of the names, and the problems: names that are missing, that have
    different values, that were not requested. names: in the order in which the judge saw them. key: field with the name
    of a row in a list; value: field with its judgement; called: what the names are called, in the plural."""
    if isinstance(answer, dict):
        answer = [{**(row if isinstance(row, dict) else {value: row}), key: name} for name, row in answer.items()]
    entries = [row for row in answer if isinstance(row, dict)] if isinstance(answer, list) else []
    meant = match_names([row.get(key, "") for row in entries], names)
    rows: dict[str, list[Row]] = {}
    for name, row in zip(meant, entries, strict=True):
        if name is not None:
            rows.setdefault(name, []).append(row)
    present = {name: rows[name] for name in names if name in rows}
    ambiguous = [name for name, matches in present.items() if len({repr(row.get(value)) for row in matches}) > 1]
    unknown = dict.fromkeys(
        str(row.get(key, "")).strip()[:40] for name, row in zip(meant, entries, strict=True) if name is None
    )
    problems = {
        "lacks": [name for name in names if name not in present],
        f"has two different {value}s for": ambiguous,
        f"has {called} that were not given:": list(unknown),
    }
    return {name: matches[0] for name, matches in present.items() if name not in ambiguous}, problems


def match_names(labels: Sequence[Any], names: Sequence[str]) -> list[str | None]:
    """Return the name that each label means, None if that is unclear: the same text, else the only name with equal
    text regardless of case, quotes and brackets, or with an equal number. If none matches and they are the numbers from
    1 to the number of names, they are positions."""
    matched = [_match(name, names) for name in labels]
    if not any(matched):
        numbers = [as_number(name) for name in labels]
        if len(labels) == len(names) and set(numbers) == set(range(1, len(names) + 1)):
            return [names[int(number) - 1] for number in numbers if number is not None]
    return matched


def _match(label: Any, names: Sequence[str]) -> str | None:
    text = str(label).strip()
    if text in names:
        return text
    folded = _folded(text)
    same = [name for name in names if _folded(name) == folded]
    if not same and isinstance(label, int | float) and (number := as_number(label)) is not None:
        same = [name for name in names if as_number(name) == number]  # 0123 and 12e4 without their quotes
    return same[0] if len(same) == 1 else None


def _folded(text: str) -> str:
    stripped = text.strip(_QUOTES)
    if stripped[:1] + stripped[-1:] in ("[]", "()", "<>", "{}"):
        stripped = stripped[1:-1].strip(_QUOTES)
    return stripped.casefold()


def as_number(value: Any) -> float | None:
    """Return a finite number, or a text that is one, as a float; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def raise_if_invalid(problems: Mapping[str, Sequence[str]], names: Sequence[str], called: str, usable: Any) -> None:
    """Raise InvalidAnswer if there is any problem. usable: the valid part of the answer; None if there is none."""
    if any(problems.values()):
        text = "; it ".join(
            f"{problem} {', '.join(affected[:MOST])}" for problem, affected in problems.items() if affected
        )
        raise InvalidAnswer(f"Your answer {text}. The {called} are {', '.join(names)}.", usable=usable)
