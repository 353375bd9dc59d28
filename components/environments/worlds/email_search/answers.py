"""Comparison of answers: values are extracted from the text by kind and compared in normalized form.

An answer is right if it names the right value and no other value of its kind, except those that the question names:
`48,500 dollars`, `$48500` and `It is 48.5k.` are equal; `48,500 or 52,000` is wrong. A date may omit its year, a person
may be named by the last name, and a firm by the first word of its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fractions import Fraction
from typing import Any

from components.environments.worlds.email_search.words import MONTHS

LONGEST = 2000
"""Maximum number of characters of an answer that are read."""
_MONTHS = {name[:3].lower(): number for number, name in enumerate(MONTHS, 1)}
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?:,?\s+(\d{4}))?"
_DATES = (
    (re.compile(r"\b(?P<y>\d{4})-(?P<m>\d{1,2})-(?P<d>\d{1,2})\b"), (1, 2, 3)),
    (re.compile(rf"\b{_DAY}\s+(?:of\s+)?{_MONTH}{_YEAR}\b", re.IGNORECASE), (3, 2, 1)),
    (re.compile(rf"\b{_MONTH}\s+{_DAY}{_YEAR}\b", re.IGNORECASE), (3, 1, 2)),
)
_NUMBER = re.compile(
    r"(?<![\w.,-])[$€]?(\d{1,3}(?:,\d{3}){1,3}|\d{1,12})(\.\d{1,4})?\s?(k|thousand|million)?(?![\w-])(?!\.\d)",
    re.IGNORECASE,
)
_CODE = re.compile(r"\b([A-Z]{2})[- ]?(\d{4})\b", re.IGNORECASE)
_UNITS = {"": 1, "k": 1000, "thousand": 1000, "million": 10**6}
_UNKNOWN = re.compile(
    r"\b(?:do not|don['’]?t|cannot|can['’]?t|could not|couldn['’]?t|did not|didn['’]?t) (?:know|find|say|tell)\b"
    r"|\bunknown\b|\bno idea\b|\bnot found\b|\bno answer\b",
    re.IGNORECASE,
)


def is_right(kind: str, answer: str, right: str, question: str, names: Collection[str] = ()) -> bool:
    """Return True if the answer is right. names: all persons, firms or places, if the value is one of them."""
    named = values(kind, answer, names) - values(kind, question, names)
    expected = values(kind, right, names)
    if kind == "date":
        return bool(named) and all(_same_day(first, second) for first in named for second in expected)
    return named == expected


def is_unknown(answer: str) -> bool:
    """Return True if the answer states that the value is unknown."""
    return _UNKNOWN.search(answer[:LONGEST]) is not None


def values(kind: str, text: str, names: Collection[str] = ()) -> set[Any]:
    """Return all values of a kind that a text names."""
    text = text[:LONGEST]
    if kind in ("money", "number"):
        return {_number(*match) for match in _NUMBER.findall(text)}
    if kind == "code":
        return {(letters.upper(), digits) for letters, digits in _CODE.findall(text)}
    if kind == "date":
        return {day for pattern, order in _DATES for match in pattern.findall(text) if (day := _day(match, order))}
    words = set(re.findall(r"\w+", text.lower()))
    return {name for name in names if _key(kind, name) in words}


def _key(kind: str, name: str) -> str:
    """Return the unique word of a name: the last word of a person's name, the first word of another name."""
    return name.lower().split()[-1 if kind == "person" else 0]


def _number(whole: str, decimals: str, unit: str) -> Fraction:
    return Fraction(whole.replace(",", "") + decimals) * _UNITS[unit.lower()]


def _day(parts: tuple[str, ...], order: tuple[int, int, int]) -> tuple[int, int, int] | None:
    year, month, day = (parts[index - 1] for index in order)
    number = int(month) if month.isdigit() else _MONTHS[month.lower()]
    return (int(year or 0), number, int(day))


def _same_day(first: tuple[int, int, int], second: tuple[int, int, int]) -> bool:
    """Return True if two dates are equal; year 0 matches every year."""
    return first[1:] == second[1:] and (first[0] == second[0] or 0 in (first[0], second[0]))
