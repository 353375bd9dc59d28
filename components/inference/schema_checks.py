"""Checks of JSON schemas before a grammar is compiled.

Literals that contain special tokens of a model, such as `{"const": "<|im_end|>"}`: llguidance demands the special
token for such a text, and a response never contains one, so that no token could follow.

Limits of the schemas of a form: their size together, their nesting, and their numbers. They name the keyword that makes
a schema costly before a grammar is compiled; other costly schemas are caught by the trial of their grammar
(`components.inference.grammar_compiler`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from components.specs.wording import shortened

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


MAX_CHARACTERS = 400_000
"""Maximum size of all schemas of a response in characters, as JSON texts."""
MAX_NESTING = 64
"""Maximum nesting depth of a schema."""
MAX_MULTIPLE = 10_000
"""Maximum number of `multipleOf`, in units of its last digit: the grammar has a state for each remainder."""
MAX_MAGNITUDE = 2.0**64
"""Maximum absolute value of numeric keywords."""
_NUMERIC = (
    "exclusiveMaximum", "exclusiveMinimum", "maximum", "maxItems", "maxLength", "maxProperties", "minimum", "minItems",
    "minLength", "minProperties", "multipleOf",
)  # fmt: skip
_DATA = ("const", "default", "enum", "examples")
"""Keywords whose values are data."""
_MAPPINGS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""Keywords whose values are schemas by name."""


def exceeded_limit(schema: Any) -> str | None:
    """Return what makes a schema too costly; None if nothing does."""
    for keyword, value, depth in _keywords(schema):
        if depth > MAX_NESTING:
            return f"is nested deeper than {MAX_NESTING} levels"
        if keyword not in _NUMERIC or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not abs(value) <= MAX_MAGNITUDE:
            return f"has {keyword} = {shortened(value)}: expected an absolute value of 2^64 at most"
        if keyword == "multipleOf" and _units(value) > MAX_MULTIPLE:
            return f"has multipleOf = {value}: expected at most {MAX_MULTIPLE}, in units of its last digit"
    return None


def _units(value: float) -> int:
    """Return a number in units of its last digit: 25 for 0.25, 300 for 300."""
    return int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits))) if value % 1 else int(abs(value))


def _keywords(schema: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield the keywords of a schema and of those in it, with their values and depths."""
    pending = [(schema, 1, False)]
    while pending:
        part, depth, named = pending.pop()
        if isinstance(part, list):
            pending += [(item, depth + 1, False) for item in part]
        elif isinstance(part, Mapping):
            for key, value in part.items():
                if not named:
                    yield key, value, depth
                if named or key not in _DATA:
                    pending.append((value, depth + 1, not named and key in _MAPPINGS))
        if depth > MAX_NESTING:
            yield "", None, depth
