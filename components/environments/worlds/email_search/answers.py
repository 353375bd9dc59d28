"""Whether an answer says the right value: values are read from the text by kind and compared in one form.

An answer is right where it names the right value and no other of its kind, those aside that the question names:
`48,500 dollars`, `$48500` and `It is 48.5k.` are equal, `48,500 or 52,000` is not right. A date may go without its
year, a person by the last name, a firm by the first word of its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fractions import Fraction
from typing import Any

from components.environments.worlds.email_search.words import MONTHS

LONGEST = 2000
"""Characters of an answer that are read."""
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
_TIMES = {"": 1, "k": 1000, "thousand": 1000, "million": 10**6}
_UNKNOWN = re.compile(
    r"\b(?:do not|don['’]?t|cannot|can['’]?t|could not|couldn['’]?t|did not|didn['’]?t) (?:know|find|say|tell)\b"
    r"|\bunknown\b|\bno idea\b|\bnot found\b|\bno answer\b",
    re.IGNORECASE,
)


def is_right(kind: str, answer: str, right: str, question: str, names: Collection[str] = ()) -> bool:
    """names: all persons, firms or places that there are, where the value is one of them."""
    said = values(kind, answer, names) - values(kind, question, names)
    wanted = values(kind, right, names)
    if kind == "date":
        return bool(said) and all(_same_day(one, other) for one in said for other in wanted)
    return said == wanted


def is_unknown(answer: str) -> bool:
    """Whether it says that it does not know."""
    return _UNKNOWN.search(answer[:LONGEST]) is not None


def values(kind: str, text: str, names: Collection[str] = ()) -> set[Any]:
    """All values of a kind that a text names."""
    text = text[:LONGEST]
    if kind in ("money", "number"):
        return {_number(*found) for found in _NUMBER.findall(text)}
    if kind == "code":
        return {(letters.upper(), digits) for letters, digits in _CODE.findall(text)}
    if kind == "date":
        return {day for pattern, order in _DATES for found in pattern.findall(text) if (day := _day(found, order))}
    said = set(re.findall(r"\w+", text.lower()))
    return {name for name in names if _key(kind, name) in said}


def _key(kind: str, name: str) -> str:
    """The word of a name that no other has: the last of a person's, the first of a firm's."""
    return name.lower().split()[-1 if kind == "person" else 0]


def _number(whole: str, rest: str, times: str) -> Fraction:
    return Fraction(whole.replace(",", "") + rest) * _TIMES[times.lower()]


def _day(found: tuple[str, ...], order: tuple[int, int, int]) -> tuple[int, int, int] | None:
    year, month, day = (found[at - 1] for at in order)
    number = int(month) if month.isdigit() else _MONTHS[month.lower()]
    return (int(year or 0), number, int(day))


def _same_day(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Year 0: not said."""
    return one[1:] == other[1:] and (one[0] == other[0] or 0 in (one[0], other[0]))
