"""How numbers are written on pages. Numbers that are missing or not finite become a dash."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_NONE = "–"
_THIN = "\N{NARROW NO-BREAK SPACE}"


def percent(value: float | None) -> str:
    """0.123 as `12 %`; small shares keep a digit."""
    if value is None or not math.isfinite(value):
        return _NONE
    share = 100 * value
    return f"{share:.1f}{_THIN}%" if 0 < abs(share) < 2 and abs(share - round(share)) > 0.05 else f"{share:.0f}{_THIN}%"


def number(value: float | None) -> str:
    """Three significant digits, without exponents for everyday sizes."""
    if value is None or not math.isfinite(value):
        return _NONE
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e6 or size < 1e-4:
        return f"{value:.2g}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """`0.42 s`, `12 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds is None or not math.isfinite(seconds):
        return _NONE
    if seconds < 10:
        return f"{seconds:.2g}{_THIN}s"
    if seconds < 60:
        return f"{seconds:.0f}{_THIN}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{_THIN}min" + (f" {rest:02d}{_THIN}s" if rest else "")
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{_THIN}h" + (f" {minutes:02d}{_THIN}min" if minutes else "")


def interval(measure: Mapping[str, Any], text: str = "number") -> str:
    """`0.61 to 0.74`, as numbers or as percentages."""
    low, high = measure["low"], measure["high"]
    if low is None or high is None:
        return ""
    return f"{percent(low)} to {percent(high)}" if text == "percent" else f"{number(low)} to {number(high)}"


def points(value: float | None) -> str:
    """A difference of shares in percentage points, with its sign."""
    return _NONE if value is None or not math.isfinite(value) else f"{100 * value:+.0f}"


def css(value: float | None) -> str:
    """A share as a CSS percentage, between 0 and 100."""
    return "0%" if value is None or not math.isfinite(value) else f"{100 * min(max(value, 0.0), 1.0):.2f}%"


def arguments(text: str) -> str:
    """JSON arguments of a tool call as a person would write them; what is no JSON mapping stays as it is."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    if not isinstance(found, dict):
        return text
    return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in found.items())


def compact(value: Any) -> str:
    """JSON data on one line."""
    return json.dumps(value, ensure_ascii=False, default=str)


def judgement(difference: Mapping[str, Any]) -> str:
    """What the interval of a difference says."""
    if difference["low"] is None:
        return "not known"
    return "better" if difference["low"] > 0 else "worse" if difference["high"] < 0 else "no clear difference"


FILTERS = {
    "percent": percent,
    "number": number,
    "duration": duration,
    "interval": interval,
    "points": points,
    "css": css,
    "arguments": arguments,
    "compact": compact,
    "judgement": judgement,
}
