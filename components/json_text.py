"""Parsing of untrusted JSON: a shared store, a folder of runs, the answer of a language model; and its files.

The standard library's parser raises RecursionError on deep nesting, which callers do not expect. This parser stops at
200 levels, so code that walks the result recursively is safe as well.

`STRICT` makes the standard library's parser reject invalid or ambiguous JSON: NaN, infinities, numbers that overflow a
float, and duplicate keys in one object.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import orjson
from pydantic_core import from_json

from components.errors import ArtifactDamaged

_REASONING = re.compile(r"<think(?:ing)?>.*?(</think(?:ing)?>|\Z)", re.S | re.I)
# Ends at its closing mark or at the end of the text. So no text is scanned again from each opening mark.
_OPENING = re.compile(r"[{\[]")
_CLOSING = {"{": "}", "[": "]"}
_PROSE_BRACE = re.compile(r"\{[^\w\s\"'}]")
"""Brace that begins no object, as in `:{)`."""
_CUT_OFF = re.compile(r"(?:t(?:ru?)?|f(?:a(?:ls?)?)?|n(?:ul?)?|-|\.|[eE][-+]?)?\s*")
"""Rest of a text behind which a value would go on."""
MOST_STARTS = 1000
"""Maximum number of brackets without a JSON value behind them in an answer."""
MOST_READ = 20
"""Maximum characters scanned in vain, as a multiple of the answer's length; short answers count as 1,000 characters."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError for text that is invalid or nested too deeply."""
    return from_json(text.encode() if isinstance(text, str) else text)  # a lone surrogate is a ValueError, too


_RECOMPUTE = "Put it back as it was, or delete the artifact's folder and run the same command again to recompute it"


def read_json(path: Path, remedy: str = _RECOMPUTE) -> Any:
    """Return the value of a JSON file of an artifact or a run. remedy: for a file of another kind. Raise
    ArtifactDamaged if it is invalid."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ArtifactDamaged(
            f"{path} is no valid JSON ({error}): the file is damaged or was edited. {remedy}"
        ) from None


def write_json(path: Path, data: Any) -> None:
    """Write JSON data to a file atomically, below folders that are created if they are missing."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def find_json(text: str, fits: Callable[[Any], bool]) -> Any:
    """Return the JSON value with which an answer of a language model ends: the whole text, or the last value outside of
    the reasoning that `fits` accepts, alone or within another value. None if there is none, and if a value that the
    answer does not finish follows.

    Earlier values may be quoted from what the model read. An episode can hold JSON in the form of an answer, and a
    judge that quotes it before its own answer must not be taken at the episode's word.
    """
    if (data := _load(text.strip())) is not None and fits(data):
        return data
    visible = _REASONING.sub(lambda match: "" if match[1] else match[0], text).rpartition("</think>")[2].strip()
    if (data := _load(visible)) is not None and fits(data):
        return data
    decoder = json.JSONDecoder()
    last = None
    end = starts = 0
    budget = MOST_READ * max(len(visible), 1000)
    for opening in _OPENING.finditer(visible):
        start = opening.start()
        if start < end:
            continue
        try:
            data, end = decoder.raw_decode(visible, start)
        except (ValueError, RecursionError) as error:
            starts += 1
            syntax = isinstance(error, json.JSONDecodeError) and not error.msg.startswith("Unterminated")
            budget -= (error.pos if syntax else len(visible)) - start  # type: ignore[union-attr]
            if starts > MOST_STARTS or budget < 0:
                return None
            if _is_unfinished(visible, opening, error):
                last = None
            continue
        fitting = _last_fitting(data, fits)
        last = last if fitting is None else fitting
    return last


def _is_unfinished(text: str, opening: re.Match[str], error: Exception) -> bool:
    """Return True if the value behind a bracket is cut off by the end of the text. A square bracket before something
    else, as in `[1)`, belongs to the prose."""
    start = opening.start()
    if text.count(opening[0], start) <= text.count(_CLOSING[opening[0]], start):
        return False
    if opening[0] == "{" and not _PROSE_BRACE.match(text, start):
        return True
    if not isinstance(error, json.JSONDecodeError) or error.msg.startswith(("Unterminated", "Invalid")):
        return True
    return _CUT_OFF.fullmatch(text, error.pos) is not None


def _last_fitting(data: Any, fits: Callable[[Any], bool]) -> Any:
    """Return the value itself if it fits, or the last value in it that does; None if there is none."""
    values = [data]
    while values:
        value = values.pop()
        if fits(value):
            return value
        inner = value.values() if isinstance(value, dict) else value
        values += [item for item in inner if isinstance(item, dict | list)]
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in keys or keys.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {duplicate[:80]!r} is there twice in one object")
    return value


def reject_constant(text: str) -> NoReturn:
    """Raise ValueError for NaN or an infinity, as the argument `parse_constant` of `json.loads`."""
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


STRICT: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": reject_constant, "parse_float": _finite}
"""Keyword arguments of `json.loads`."""
