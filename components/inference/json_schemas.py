"""JSON schemas before their grammar is compiled: bounds for their numbers, and checks.

llguidance's grammar of an unbounded number has any exponent, and `1e999` is no finite number for a client. Schemas are
therefore narrowed: unbounded numbers are bounded, and where a schema allows any JSON value, its numbers are bounded
too. What validates against the narrower schema validates against the original.

Literals that contain special tokens of a model, such as `{"const": "<|im_end|>"}`, are detected: llguidance demands the
special token for such a text, and a response never contains one, so that no token could follow.

Limits of the schemas of a form are their size together, their nesting, and their numbers. They name the keyword that
makes a schema costly before a grammar is compiled; other costly schemas are caught by the trial of their grammar
(`components.inference.grammar_compiler`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from components.specs.wording import shortened

BOUND = 1e15
"""Largest absolute value of a number without bounds of its own."""
ANY = "espalier_any"
"""Name of the definition of any value with bounded numbers."""
_REFERENCE = {"$ref": f"#/$defs/{ANY}"}
_DEFINITION = {
    "anyOf": [
        {"type": "string"},
        {"type": "number", "minimum": -BOUND, "maximum": BOUND},
        {"type": ["boolean", "null"]},
        {"type": "array", "items": _REFERENCE},
        {"type": "object", "additionalProperties": _REFERENCE},
    ]
}
_LABELS = {"$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "examples", "title"}
"""Keywords that constrain nothing."""
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""Keywords with schemas by name."""
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords with lists of schemas."""
_DATA = ("const", "default", "enum", "examples")
"""Keywords whose values are data."""
_LITERAL = ("const", "enum", "pattern", "required")
"""Keywords whose values are texts of a response."""
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_NUMERIC = (
    "exclusiveMaximum", "exclusiveMinimum", "maximum", "maxItems", "maxLength", "maxProperties", "minimum", "minItems",
    "minLength", "minProperties", "multipleOf",
)  # fmt: skip

MAX_CHARACTERS = 400_000
"""Maximum size of all schemas of a response in characters, as JSON texts."""
MAX_NESTING = 64
"""Maximum nesting depth of a schema."""
MAX_MULTIPLE = 10_000
"""Maximum number of `multipleOf`, in units of its last digit: the grammar has a state for each remainder."""
MAX_MAGNITUDE = 2.0**64
"""Maximum absolute value of numeric keywords."""


def with_finite_numbers(schema: Any) -> Any:
    """Return a schema that allows only finite numbers; what is no object is returned unchanged."""
    if not isinstance(schema, dict):
        return schema
    narrowed = _narrowed(schema)
    definitions = narrowed.get("$defs")
    return {**narrowed, "$defs": {**(definitions if isinstance(definitions, dict) else {}), ANY: _DEFINITION}}


def _narrowed(schema: Any) -> Any:
    if schema is True:
        return _REFERENCE
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            result[name] = {key: _narrowed(part) for key, part in value.items()}
        elif name in _LISTS and isinstance(value, list):
            result[name] = [_narrowed(part) for part in value]
        elif name in ("items", "additionalProperties"):
            result[name] = _narrowed(value)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not schema.keys() - _LABELS:
        return {**result, **_REFERENCE}
    if "enum" in schema or "const" in schema or "$ref" in schema:
        return result
    if "number" in kinds:
        numbers = {name: value for name, value in schema.items() if _is_number(value)}
        if not any(name in schema for name in _LOWER):
            result["minimum"] = min([-BOUND, *(numbers[name] - BOUND for name in _UPPER if name in numbers)])
        if not any(name in schema for name in _UPPER):
            result["maximum"] = max([BOUND, *(numbers[name] + BOUND for name in _LOWER if name in numbers)])
    if "array" in kinds and "items" not in schema and "prefixItems" not in schema:
        result["items"] = _REFERENCE
    if "object" in kinds and "additionalProperties" not in schema:
        result["additionalProperties"] = _REFERENCE
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def special_literal(schema: Any, special: Sequence[str]) -> str | None:
    """Return a literal of a schema (value, pattern, property name) that contains a special token; None without one."""
    literals: list[str] = []
    for keyword, value, _ in _keywords(schema):
        if keyword in _LITERAL:
            literals += _strings(value)
        elif keyword in _NAMED and isinstance(value, Mapping):
            literals += map(str, value)
    joined = "\0".join(literals)  # one search for each token, not one for each token in each literal
    present = [token for token in special if token in joined]
    return next((text for text in literals if any(token in text for token in present)), None)


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


def exceeded_limit(schema: Any) -> str | None:
    """Return what makes a schema too costly; None if nothing does."""
    for keyword, value, depth in _keywords(schema):
        if depth > MAX_NESTING:
            return f"is nested deeper than {MAX_NESTING} levels"
        if keyword not in _NUMERIC or not _is_number(value):
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
                    pending.append((value, depth + 1, not named and key in _NAMED))
        if depth > MAX_NESTING:
            yield "", None, depth
