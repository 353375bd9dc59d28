"""Schemas without numbers that overflow.

llguidance's grammar of an unbounded number has any exponent, and `1e999` is no finite number for a client. Schemas are
therefore narrowed: unbounded numbers are bounded, and where a schema allows any JSON value, its numbers are bounded
too. What validates against the narrower schema validates against the original.
"""

from __future__ import annotations

from typing import Any

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
_VALUES = ("$defs", "definitions", "patternProperties", "properties")
"""Keywords with schemas by name."""
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords with lists of schemas."""
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


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
    for name in _VALUES:
        if isinstance(schema.get(name), dict):
            result[name] = {key: _narrowed(value) for key, value in schema[name].items()}
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            result[name] = [_narrowed(value) for value in schema[name]]
    for name in ("items", "additionalProperties"):
        if name in schema:
            result[name] = _narrowed(schema[name])
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not schema.keys() - _LABELS:
        return {**result, **_REFERENCE}
    if "enum" in schema or "const" in schema or "$ref" in schema:
        return result
    if "number" in kinds:
        if not any(name in schema for name in _LOWER):
            result["minimum"] = min([-BOUND, *(schema[name] - BOUND for name in _UPPER if _is_number(schema, name))])
        if not any(name in schema for name in _UPPER):
            result["maximum"] = max([BOUND, *(schema[name] + BOUND for name in _LOWER if _is_number(schema, name))])
    if "array" in kinds and "items" not in schema and "prefixItems" not in schema:
        result["items"] = _REFERENCE
    if "object" in kinds and "additionalProperties" not in schema:
        result["additionalProperties"] = _REFERENCE
    return result


def _is_number(schema: dict[str, Any], name: str) -> bool:
    return isinstance(schema.get(name), int | float) and not isinstance(schema.get(name), bool)
