"""JSON that somebody else may have written: a shared store, a folder of runs.

The standard library's parser follows nesting until Python's recursion limit raises RecursionError, which no caller of a
JSON parser expects. This one stops at 200 levels, so code that walks the result recursively is safe as well.

`STRICT` makes the standard library's parser refuse what is no JSON or has two readings: NaN, infinities, numbers that
overflow a float, and a key twice in one object.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

from pydantic_core import from_json

from components.errors import ArtifactDamaged


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError, which says why, for text that is none or nested too deeply."""
    return from_json(text.encode() if isinstance(text, str) else text)  # half of a surrogate pair is a ValueError, too


def read_json(path: Path) -> Any:
    """Return the value of a JSON file of an artifact or of a run. Raise ArtifactDamaged where it is none."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ArtifactDamaged(
            f"{path} is no valid JSON ({error}): it was damaged or changed by hand. Put it back as it was; an artifact "
            "can also be deleted with its folder, and is made again by the same command"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is there twice in one object")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


STRICT: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _no_constant, "parse_float": _finite}
"""Arguments of `json.loads`."""
