"""Parsing of untrusted JSON: a shared store, a folder of runs.

The standard library's parser raises RecursionError on deep nesting, which callers do not expect. This parser stops at
200 levels, so code that walks the result recursively is safe as well.

`STRICT` makes the standard library's parser reject invalid or ambiguous JSON: NaN, infinities, numbers that overflow a
float, and duplicate keys in one object.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

from pydantic_core import from_json

from components.errors import ArtifactDamaged


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError for text that is invalid or nested too deeply."""
    return from_json(text.encode() if isinstance(text, str) else text)  # a lone surrogate is a ValueError, too


def read_json(path: Path) -> Any:
    """Return the value of a JSON file of an artifact or a run. Raise ArtifactDamaged if it is invalid."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ArtifactDamaged(
            f"{path} is no valid JSON ({error}): the file is damaged or was edited. Put it back as it was, or delete "
            "the artifact's folder and run the same command again to recompute it"
        ) from None


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
