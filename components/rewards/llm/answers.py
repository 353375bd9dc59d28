"""What a judge's answer says: JSON found in prose, numbers found on whatever scale.

Judges are asked for JSON and for scores from 0 to 1. Many write something around it, or count to 10 or 100. What can be
read with certainty is; anything else is no answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

# Both end at their closing mark or at the end of the text, so that no text is read again from each opening mark.
_THOUGHT = re.compile(r"<think(?:ing)?>.*?(</think(?:ing)?>|\Z)", re.S | re.I)
_FENCE = re.compile(r"```[\w-]*+[^\S\n]*+\n(.*?)(?:(```)|\Z)", re.S)
_OPENING = re.compile(r"[{\[]")
MOST_STARTS = 200
"""Brackets of an answer at which JSON is looked for."""
MOST_READ = 20
"""Times the length of an answer that is read for JSON, over all brackets; short answers count as 1,000 characters."""
_SHARE = re.compile(r"^\s*([-+]?\d+(?:\.\d+)?)\s*(?:/|out of|of)\s*(\d+(?:\.\d+)?)\s*$", re.I)
_PERCENT = re.compile(r"^\s*([-+]?\d+(?:\.\d+)?)\s*%\s*$")


def find_json(text: str, fits: Callable[[Any], bool]) -> Any:
    """The first JSON in a text that fits: the whole of it, what is fenced, or what stands somewhere in it, outside of
    what the judge thought aloud. None where there is none."""
    said = _THOUGHT.sub(lambda thought: "" if thought[1] else thought[0], text).rpartition("</think>")[2].strip()
    for part in (said, *(fence[1] for fence in _FENCE.finditer(said) if fence[2])):
        found = _loaded(part)
        if found is not None and fits(found):
            return found
    decoder = json.JSONDecoder()
    end = 0
    left = MOST_READ * max(len(said), 1000)
    for number, opening in enumerate(_OPENING.finditer(said)):
        if number == MOST_STARTS or left < 0:
            break
        start = opening.start()
        if start < end:
            continue
        try:
            found, end = decoder.raw_decode(said, start)
        except json.JSONDecodeError as error:
            left -= (len(said) if error.msg.startswith("Unterminated") else error.pos) - start
            continue
        except (ValueError, RecursionError):
            left -= len(said) - start
            continue
        left -= end - start
        if fits(found):
            return found
        end = 0  # it may be inside
    return None


def _loaded(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        pass
    try:
        return json.loads(text)  # NaN and the like, of which the number is then refused and not the answer
    except (ValueError, RecursionError):
        return None


def read_scores(given: Mapping[str, Any]) -> dict[str, float]:
    """Scores from 0 to 1 by id; those that cannot be read are left out.

    "8/10", "8 out of 10" and "40%" say their scale. Of plain numbers it is the one on which all of an answer's fit: to
    1, to 10 or to 100, by the largest; where some lie between 0 and 1 and others from 2 on, each has its own. What is
    below 0 or little above 1 is cut to the ends.
    """
    plain: dict[str, float] = {}
    found: dict[str, float] = {}
    for name, value in given.items():
        share = _share(value)
        if share is not None:
            found[name] = share
        elif (number := _number(value)) is not None:
            plain[name] = number
    mixed = any(0 < one < 1 for one in plain.values())
    top = max(plain.values(), default=0.0)
    for name, number in plain.items():
        found[name] = number / _scale(number if mixed else top)
    return {name: min(max(found[name], 0.0), 1.0) for name in given if name in found}


def _scale(top: float) -> float:
    """1, 10 or 100: the scale of numbers of which the largest is `top`."""
    return 1.0 if top < 2 else 10.0 if top <= 10 else 100.0


def _share(value: Any) -> float | None:
    if not isinstance(value, str):
        return None
    if match := _PERCENT.match(value):
        return float(match[1]) / 100
    if (match := _SHARE.match(value)) and float(match[2]) > 0:
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
