"""Validation of model output against untrusted JSON schemas, in bounded time.

The package jsonschema matches `pattern` with `re`, which can backtrack exponentially, and compares `uniqueItems`
pairwise, and it follows references without end. Here patterns share a time limit per validation, items are compared by
hash, and references are counted. Needs the package jsonschema, which is imported at the point of use.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import regex

SECONDS = 1.0
"""Time limit of all patterns of one validation."""
MAX_NODES = 5_000
"""Maximum number of values in a schema."""
MAX_PATTERNS = 100
"""Maximum number of regular expressions in a schema."""
MAX_PATTERN = 1_000
"""Maximum length of a regular expression, in characters."""
MAX_STEPS = 50_000
"""Maximum number of references, combinations and conditions that a validation evaluates: a schema of 40 lines can refer
to itself 2^40 times."""
_COMBINING = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "extends", "disallow")
"""Keywords with which a schema applies others to the same value."""
_steps_left: ContextVar[list[int] | None] = ContextVar("steps_left", default=None)
_seconds_left: ContextVar[list[float] | None] = ContextVar("seconds_left", default=None)
_has_patterns: ContextVar[bool] = ContextVar("has_patterns", default=True)
"""True if `patternProperties` occurs anywhere in the schema of the current validation."""


class LimitExceeded(Exception):
    """Limit of a validation exceeded."""


def too_large(schema: Any) -> str:
    """Return the limit that an untrusted schema exceeds, or an empty text: the check of a schema compiles each of its
    patterns, and takes time for each value."""
    nodes = patterns = 0
    pending = [schema]
    while pending:
        value = pending.pop()
        nodes += 1
        if nodes > MAX_NODES:
            return f"more than {MAX_NODES} values"
        if isinstance(value, dict):
            inner = value.get("patternProperties")
            names = [value.get("pattern"), *(inner if isinstance(inner, dict) else ())]
            expressions = [name for name in names if isinstance(name, str)]
            patterns += len(expressions)
            if patterns > MAX_PATTERNS:
                return f"more than {MAX_PATTERNS} patterns"
            if any(len(expression) > MAX_PATTERN for expression in expressions):
                return f"a pattern of more than {MAX_PATTERN} characters"
        if isinstance(value, dict | list):
            if len(value) > MAX_NODES:
                return f"more than {MAX_NODES} values"
            pending += value.values() if isinstance(value, dict) else value
    return ""


def first_error(validator: Any, instance: Any) -> Any:
    """Return the most relevant ValidationError, or None. validator: instance of a class returned by `bounded`."""
    from jsonschema.exceptions import ValidationError, best_match

    patterns_before = _has_patterns.set("'patternProperties'" in repr(validator.schema))
    try:
        with _limits():
            return best_match(validator.iter_errors(instance))
    except LimitExceeded as error:
        return ValidationError(str(error))
    except ValidationError as error:  # an invalid pattern
        return error
    finally:
        _has_patterns.reset(patterns_before)


def try_references(validator: Any) -> None:
    """Follow the references of a schema that apply to an empty object. Raises LimitExceeded, and
    `referencing.exceptions.Unresolvable`."""
    with _limits():
        for _ in validator.iter_errors({}):
            pass


@contextmanager
def _limits() -> Iterator[None]:
    """Limit the patterns and references of a validation."""
    seconds_before, steps_before = _seconds_left.set([SECONDS]), _steps_left.set([MAX_STEPS])
    try:
        yield
    except RecursionError:
        text = "the references of the schema, or the levels of the value, are nested too deeply"
        raise LimitExceeded(text) from None
    finally:
        _steps_left.reset(steps_before)
        _seconds_left.reset(seconds_before)


@functools.cache
def bounded(kind: Any) -> Any:
    """Return the validator class with bounded-time versions of its unbounded keywords."""
    from jsonschema import validators
    from jsonschema.exceptions import ValidationError

    original = kind.VALIDATORS

    def pattern(validator: Any, expression: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not _matches(expression, instance):
            yield ValidationError(f"{instance!r:.200} does not match {expression!r}")

    def pattern_properties(validator: Any, properties: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "object"):
            return
        for expression, inner in properties.items():
            for name, value in instance.items():
                if _matches(expression, name):
                    yield from validator.descend(value, inner, path=name, schema_path=expression)

    def additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "object") or "patternProperties" not in schema:
            yield from original["additionalProperties"](validator, allowed, instance, schema)
            return
        expressions = schema["patternProperties"]
        others = {
            name: value
            for name, value in instance.items()
            if name not in schema.get("properties", {})
            and not any(_matches(expression, name) for expression in expressions)
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
        distinct = {_hashable(item) for item in instance}
        if len(distinct) < len(instance):
            yield ValidationError(f"{instance!r:.200} has non-unique elements")

    def counted(check: Any) -> Any:
        def run(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            left = _steps_left.get()
            if left is not None:
                left[0] -= 1
                if left[0] < 0:
                    raise LimitExceeded(f"the references of the schema were not done after {MAX_STEPS} steps")
            yield from check(validator, value, instance, schema) or ()

        return run

    keywords = {
        **{name: counted(original[name]) for name in _COMBINING if name in original},
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
        "unevaluatedProperties": unevaluated_properties,
        "uniqueItems": unique_items,
    }
    return validators.extend(kind, {name: check for name, check in keywords.items() if name in original})


def _matches(expression: Any, text: str) -> bool:
    from jsonschema.exceptions import ValidationError

    seconds_left = _seconds_left.get() or [SECONDS]
    began = time.monotonic()
    try:
        matches = regex.search(expression, text, timeout=max(seconds_left[0], 0.001), concurrent=True) is not None
    except TimeoutError:
        raise LimitExceeded(f"the patterns of the schema were not done after {SECONDS:g} s") from None
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValidationError(f"the schema's pattern {expression!r:.100} is no regular expression: {error}") from None
    seconds_left[0] -= time.monotonic() - began
    return matches


def _hashable(value: Any) -> Any:
    """Return a hashable value that is equal for equal JSON values: 1 equals 1.0, but not true."""
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, Mapping):
        return ("object", frozenset((name, _hashable(member)) for name, member in value.items()))
    return ("array", *map(_hashable, value)) if isinstance(value, list) else value
