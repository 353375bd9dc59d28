"""Literals of JSON schemas that contain special tokens of a model, such as `{"const": "<|im_end|>"}`.

llguidance demands the special token for such a text, and a response never contains one, so that no token could follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ANNOTATIONS = ("$comment", "$id", "$schema", "default", "description", "examples", "title")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
"""Keywords whose values are schemas by name."""
_LITERAL = ("const", "enum", "pattern", "required")


def special_literal(schema: Any, special: Sequence[str]) -> str | None:
    """Return the first literal of a schema (value, pattern or property name) that contains a special token; None if
    there is none."""
    literals = list(_literals(schema))
    joined = "\0".join(literals)  # one search for each token, not one for each token in each literal
    present = [token for token in special if token in joined]
    return next((text for text in literals if any(token in text for token in present)), None)


def _literals(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for part in schema:
            yield from _literals(part)
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword in _LITERAL:
            yield from _strings(value)
        elif keyword in _NAMED and isinstance(value, Mapping):
            yield from map(str, value)
            yield from _literals(list(value.values()))
        elif keyword not in _ANNOTATIONS:
            yield from _literals(value)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from map(str, value)
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)
