"""Rows of a judge's answer, each with one of the requested names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.rewards.llm.question import InvalidAnswer

Row = dict[str, Any]
MOST = 20
"""Maximum number of names in one correction."""


def by_name(
    answer: Any, names: Sequence[str], key: str, value: str, called: str
) -> tuple[dict[str, Row], dict[str, list[str]]]:
    """Return the first row of each name, in the order of the names, and the problems: names that are missing, that have
    different values, that were not requested. key: field with a row's name; value: field with its judgement; called:
    what the names are called, in the plural. A mapping by name is accepted in place of rows."""
    if isinstance(answer, dict):
        answer = [{key: name, **(row if isinstance(row, dict) else {value: row})} for name, row in answer.items()]
    rows: dict[str, list[Row]] = {}
    for row in answer if isinstance(answer, list) else []:
        if isinstance(row, dict):
            rows.setdefault(str(row.get(key, "")).strip(), []).append(row)
    present = {name: matches for name in names if (matches := rows.get(name))}
    ambiguous = [name for name, matches in present.items() if len({repr(row.get(value)) for row in matches}) > 1]
    problems = {
        "lacks": [name for name in names if name not in present],
        f"has two different {value}s for": ambiguous,
        f"has {called} that were not given:": [name[:40] for name in rows if name not in names],
    }
    return {name: matches[0] for name, matches in present.items() if name not in ambiguous}, problems


def raise_if_invalid(problems: dict[str, list[str]], names: Sequence[str], called: str, usable: Any) -> None:
    """Raise InvalidAnswer if there is any problem. usable: the valid part of the answer; None if there is none."""
    if any(problems.values()):
        text = "; it ".join(
            f"{problem} {', '.join(affected[:MOST])}" for problem, affected in problems.items() if affected
        )
        raise InvalidAnswer(f"Your answer {text}. The {called} are {', '.join(names)}.", usable=usable)
