"""JSON schemas of others, held against what a model wrote, in bounded time.

The package jsonschema matches `pattern` with `re`, which can backtrack for ever, and compares `uniqueItems` pairwise.
Here patterns are matched with a limit of time for a whole validation, and items are compared by hash. Needs the package
jsonschema, which is imported where it is used.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import regex

SECONDS = 1.0
"""Time of all patterns of one validation."""
_seconds_left: ContextVar[list[float] | None] = ContextVar("seconds_left", default=None)
_has_patterns: ContextVar[bool] = ContextVar("has_patterns", default=True)
"""Whether `patternProperties` occurs anywhere in the schema of the validation under way."""


class _TimeUp(Exception):
    """The patterns of a validation took longer than they may."""


def first_error(validator: Any, instance: Any) -> Any:
    """Return the most relevant ValidationError, or None. validator: of a class that `bounded` returned."""
    from jsonschema.exceptions import ValidationError, best_match

    before = _seconds_left.set([SECONDS])
    patterns_before = _has_patterns.set("'patternProperties'" in repr(validator.schema))
    try:
        return best_match(validator.iter_errors(instance))
    except _TimeUp as error:
        return ValidationError(str(error))
    except ValidationError as error:  # a pattern that is none
        return error
    finally:
        _has_patterns.reset(patterns_before)
        _seconds_left.reset(before)


@functools.cache
def bounded(kind: Any) -> Any:
    """Return the validator class with the keywords replaced whose time is not bounded."""
    from jsonschema import validators
    from jsonschema.exceptions import ValidationError

    original = kind.VALIDATORS

    def pattern(validator: Any, expression: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not _found(expression, instance):
            yield ValidationError(f"{instance!r:.200} does not match {expression!r}")

    def pattern_properties(validator: Any, properties: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "object"):
            return
        for expression, inner in properties.items():
            for name, value in instance.items():
                if _found(expression, name):
                    yield from validator.descend(value, inner, path=name, schema_path=expression)

    def additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "object") or "patternProperties" not in schema:
            yield from original["additionalProperties"](validator, allowed, instance, schema)
            return
        expressions = schema["patternProperties"]
        others = {
            name: value
            for name, value in instance.items()
            if name not in schema.get("properties", {}) and not any(_found(one, name) for one in expressions)
        }
        plain = {key: value for key, value in schema.items() if key != "patternProperties"}
        yield from original["additionalProperties"](validator, allowed, others, {**plain, "properties": {}})

    def unevaluated_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if _has_patterns.get():
            yield ValidationError("unevaluatedProperties together with patternProperties cannot be checked here")
            return
        yield from original["unevaluatedProperties"](validator, allowed, instance, schema)

    def unique_items(validator: Any, unique: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not unique or not validator.is_type(instance, "array"):
            return
        distinct = {_hashable(one) for one in instance}
        if len(distinct) < len(instance):
            yield ValidationError(f"{instance!r:.200} has non-unique elements")

    keywords = {
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
        "unevaluatedProperties": unevaluated_properties,
        "uniqueItems": unique_items,
    }
    return validators.extend(kind, {name: check for name, check in keywords.items() if name in original})


def _found(expression: Any, text: str) -> bool:
    from jsonschema.exceptions import ValidationError

    left = _seconds_left.get() or [SECONDS]
    began = time.monotonic()
    try:
        found = regex.search(expression, text, timeout=max(left[0], 0.001), concurrent=True) is not None
    except TimeoutError:
        raise _TimeUp(f"the patterns of the schema were not done after {SECONDS:g} s") from None
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValidationError(f"the schema's pattern {expression!r:.100} is no regular expression: {error}") from None
    left[0] -= time.monotonic() - began
    return found


def _hashable(value: Any) -> Any:
    """Return what is equal for values that JSON schemas take for equal: 1 is 1.0, and is not true."""
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, Mapping):
        return ("object", frozenset((name, _hashable(one)) for name, one in value.items()))
    return ("array", *map(_hashable, value)) if isinstance(value, list) else value
