"""Final answers in texts: the last number, the content of a box, the last line."""

from __future__ import annotations

import re

NUMBER = re.compile(r"(?:(?<![\w.)])[-+−])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
"""Number with an optional sign, thousands separators, decimals and exponent."""
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_RUN = re.compile(r"((?:[\w./+–−-]|(?<=\d)[,:](?=\d))++)([ \u00a0]?\\?%)?")
"""Characters that may belong to one number, and a percent sign after them."""
_VALUE = re.compile(rf"([-+–−]?(?:{_DIGITS})(?:[eE][-+]?\d+)?)(?:/({_DIGITS}))?(?:[-/]?[^\W\d_]++)*+")
"""Number, or fraction, with a unit."""
_LEAD = re.compile(r"^\W*(?:####|(?:the )?(?:final )?answer(?: is)?\s*[:=]?)\s*", re.IGNORECASE)


class Percentage(float):
    """Number with a percent sign, as a fraction: `50%` is 0.5."""


def numbers(text: str) -> list[float | None]:
    """Return the numbers in a text, in order.

    Signs, thousands separators, decimals, exponents, slashes (`1/2`) and percent signs (`50%` is 0.5) belong to a
    number, and a unit may follow it. None stands for what begins like a number and is none: a date, a version, a range,
    a list without spaces. Digits of a word, such as `x7`, are no number."""
    runs = [match for match in _RUN.finditer(text) if match[1].lstrip("_+-–−./")[:1].isdecimal()]
    return [_value(match[1].strip("_").rstrip("_.+-–−/"), match[2] is not None) for match in runs]


def last_number(text: str) -> float | None:
    """Return the last number in a text; None if there is none."""
    return next((number for number in reversed(numbers(text)) if number is not None), None)


def only_number(text: str) -> float | None:
    """Return the number of a text with exactly one; None for any other text."""
    candidates = numbers(text)
    return candidates[0] if len(candidates) == 1 else None


def _value(run: str, percent: bool) -> float | None:
    match = _VALUE.fullmatch(run)
    if match is None:
        return None
    value = float(re.sub("[–−]", "-", match[1]).replace(",", ""))
    divisor = 1.0 if match[2] is None else float(match[2].replace(",", ""))
    if not divisor:
        return None
    return Percentage(value / divisor / 100.0) if percent else value / divisor


def same_number(number: float, expected: float, absolute: float, relative: float = 0.0) -> bool:
    """Return True if |number - expected| <= max(absolute, relative · |expected|). If only one of them has a percent
    sign, `25%` is 25 or 0.25: data sets of questions write either for it."""
    percentages = isinstance(number, Percentage), isinstance(expected, Percentage)
    pairs = [(number, expected)]
    if percentages == (True, False):
        pairs.append((100.0 * number, expected))
    if percentages == (False, True):
        pairs.append((number, 100.0 * expected))
    return any(abs(value - target) <= max(absolute, relative * abs(target)) for value, target in pairs)


def last_line(text: str) -> str:
    """Return the last non-empty line, without a leading "Answer:" or "####"; empty if there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    return _LEAD.sub("", lines[-1]).strip(" *_") if lines else ""


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{…}, with balanced braces; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start + len("\\boxed{") : at].strip()
    return None
