"""Rows of a judge's answer, each under a name that was given to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.rewards.llm.question import InvalidAnswer

Row = dict[str, Any]
MOST = 20
"""Names in one correction."""


def by_name(
    given: Any, names: Sequence[str], key: str, value: str, called: str
) -> tuple[dict[str, Row], dict[str, list[str]]]:
    """The first row of each name, in the order of the names, and what is wrong: names that are lacking, that have
    different values, that were not given. key: of a row's name; value: of what it says; called: what the names are, in
    the plural. A mapping by name is taken for rows."""
    if isinstance(given, dict):
        given = [{key: name, **(one if isinstance(one, dict) else {value: one})} for name, one in given.items()]
    rows: dict[str, list[Row]] = {}
    for one in given if isinstance(given, list) else []:
        if isinstance(one, dict):
            rows.setdefault(str(one.get(key, "")).strip(), []).append(one)
    known = {name: found for name in names if (found := rows.get(name))}
    twice = [name for name, found in known.items() if len({repr(one.get(value)) for one in found}) > 1]
    wrong = {
        "lacks": [name for name in names if name not in known],
        f"has two different {value}s for": twice,
        f"has {called} that were not given:": [name[:40] for name in rows if name not in names],
    }
    return {name: found[0] for name, found in known.items() if name not in twice}, wrong


def raise_if_invalid(wrong: dict[str, list[str]], names: Sequence[str], called: str, rest: Any) -> None:
    """Raises InvalidAnswer where anything is wrong. rest: what can be used all the same; None is nothing."""
    if any(wrong.values()):
        text = "; it ".join(f"{what} {', '.join(found[:MOST])}" for what, found in wrong.items() if found)
        raise InvalidAnswer(f"Your answer {text}. The {called} are {', '.join(names)}.", rest=rest)
