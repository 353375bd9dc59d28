"""Final answers in texts: the last number, the content of a box, the last line."""

from __future__ import annotations

import re

NUMBER = re.compile(r"(?:(?<![\w.)])[-+−])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
"""Number with an optional sign, thousands separators, decimals and exponent."""
_LEAD = re.compile(r"^\W*(?:####|(?:the )?(?:final )?answer(?: is)?\s*[:=]?)\s*", re.IGNORECASE)


def last_number(text: str) -> float | None:
    """Return the last number in a text; None if there is none."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


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
