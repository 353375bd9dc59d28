"""Parsing of a judge's answer: JSON in prose, numbers on any common scale.

Judges are asked for JSON and for scores from 0 to 1. Many add prose around it, or score from 0 to 10 or 100. Only
unambiguous answers are parsed; anything else is invalid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

# Both end at their closing mark or at the end of the text. So no text is scanned again from each opening mark.
_REASONING = re.compile(r"<think(?:ing)?>.*?(</think(?:ing)?>|\Z)", re.S | re.I)
_FENCE = re.compile(r"```[\w-]*+[^\S\n]*+\n(.*?)(?:(```)|\Z)", re.S)
_OPENING = re.compile(r"[{\[]")
MOST_STARTS = 200
"""Maximum number of brackets at which the parser looks for JSON."""
MOST_READ = 20
"""Maximum characters scanned for JSON over all brackets, as a multiple of the answer's length; short answers count as
1,000 characters."""
_FRACTION = re.compile(r"^\s*([-+]?\d+(?:\.\d+)?)\s*(?:/|out of|of)\s*(\d+(?:\.\d+)?)\s*$", re.I)
_PERCENT = re.compile(r"^\s*([-+]?\d+(?:\.\d+)?)\s*%\s*$")


def find_json(text: str, fits: Callable[[Any], bool]) -> Any:
    """Return the first JSON value in a text that `fits` accepts: the whole text, a fenced block, or an embedded value,
    outside of the judge's reasoning. None if there is none."""
    visible = _REASONING.sub(lambda match: "" if match[1] else match[0], text).rpartition("</think>")[2].strip()
    for part in (visible, *(fence[1] for fence in _FENCE.finditer(visible) if fence[2])):
        data = _load(part)
        if data is not None and fits(data):
            return data
    decoder = json.JSONDecoder()
    end = 0
    budget = MOST_READ * max(len(visible), 1000)
    for number, opening in enumerate(_OPENING.finditer(visible)):
        if number == MOST_STARTS or budget < 0:
            break
        start = opening.start()
        if start < end:
            continue
        try:
            data, end = decoder.raw_decode(visible, start)
        except json.JSONDecodeError as error:
            budget -= (len(visible) if error.msg.startswith("Unterminated") else error.pos) - start
            continue
        except (ValueError, RecursionError):
            budget -= len(visible) - start
            continue
        budget -= end - start
        if fits(data):
            return data
        end = 0  # the wanted value may be nested in this one
    return None


def _load(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        pass
    try:
        return json.loads(text)  # accepts NaN: then only that number is rejected, not the whole answer
    except (ValueError, RecursionError):
        return None


def read_scores(raw_scores: Mapping[str, Any]) -> dict[str, float]:
    """Return scores from 0 to 1 by id, without those that cannot be parsed.

    "8/10", "8 out of 10" and "40%" state their scale. Plain numbers share the scale that fits all of an answer's
    numbers: 1, 10 or 100, by the largest. If some lie between 0 and 1 and others are 2 or more, each number has its own
    scale. Values below 0 or slightly above 1 are clipped to [0, 1].
    """
    plain: dict[str, float] = {}
    scores: dict[str, float] = {}
    for name, value in raw_scores.items():
        fraction = _fraction(value)
        if fraction is not None:
            scores[name] = fraction
        elif (number := _number(value)) is not None:
            plain[name] = number
    mixed = any(0 < number < 1 for number in plain.values())
    top = max(plain.values(), default=0.0)
    for name, number in plain.items():
        scores[name] = number / _scale(number if mixed else top)
    return {name: min(max(scores[name], 0.0), 1.0) for name in raw_scores if name in scores}


def _scale(top: float) -> float:
    """Return the scale of numbers whose largest is `top`: 1, 10 or 100."""
    return 1.0 if top < 2 else 10.0 if top <= 10 else 100.0


def _fraction(value: Any) -> float | None:
    if not isinstance(value, str):
        return None
    if match := _PERCENT.match(value):
        return float(match[1]) / 100
    if (match := _FRACTION.match(value)) and float(match[2]) > 0:
        return float(match[1]) / float(match[2])
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
