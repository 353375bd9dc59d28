"""Wording of validation errors: pydantic detects them, this module says what was expected, in a user's words.

`expected` knows every kind of error that plain data (JSON, YAML) can cause. pydantic's own text names classes and
Python types, so it is used for none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from components.redaction import MASK, is_secret, mask_text

MAX_QUOTED = 80
"""Characters of a value that a problem quotes."""

_KINDS = {
    "a whole number": ("int_type", "int_parsing", "int_parsing_size", "int_from_float"),
    "a number": ("float_type", "float_parsing"),
    "a finite number": ("finite_number",),
    "true or false": ("bool_type", "bool_parsing"),
    "text": ("string_type", "string_unicode", "bytes_type"),
    "a list": ("list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type", "sequence_str"),
    "a list of different texts or numbers": ("set_item_not_hashable",),
    "a mapping of keys to values": (
        "dict_type", "model_type", "model_attributes_type", "mapping_type", "dataclass_type", "named_tuple_type",
    ),
    "text as the key": ("invalid_key",),
    "null": ("none_required",),
    "a URL, such as https://HOST:PORT": ("url_type", "url_parsing", "url_syntax_violation", "url_too_long"),
}  # fmt: skip
EXPECTED = {kind: words for words, kinds in _KINDS.items() for kind in kinds}
"""Expected type by pydantic's type of the error, for errors about the type of a value."""
BOUNDS = {"greater_than": ("more than", "gt"), "greater_than_equal": ("at least", "ge"),
          "less_than": ("less than", "lt"), "less_than_equal": ("at most", "le")}  # fmt: skip
"""Words before a bound, and its name in the context of the error."""
_QUOTED = re.compile(r"'([^']*)'")
_COLLECTIONS = {"Sequence": "a list", "Iterable": "a list", "Collection": "a list", "Set": "a list",
                "Mapping": "a mapping of keys to values"}  # fmt: skip
_LENGTHS = {"too_short": ("at least", "min_length", "entry", "entries"),
            "too_long": ("at most", "max_length", "entry", "entries"),
            "string_too_short": ("text of at least", "min_length", "character", "characters"),
            "string_too_long": ("text of at most", "max_length", "character", "characters")}  # fmt: skip


def expected(detail: Mapping[str, Any]) -> str:
    """Return what was expected in place of a value. detail: item of `ValidationError.errors()`."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in EXPECTED:
        return EXPECTED[kind]
    if kind in BOUNDS:
        words, name = BOUNDS[kind]
        limit = context[name] if isinstance(context[name], int) else f"{context[name]:g}"
        return f"{words} {limit}"
    if kind in _LENGTHS:
        if isinstance(detail["input"], str) and not kind.startswith("string_"):  # of a union of text and list
            kind = f"string_{kind}"
        words, name, singular, plural = _LENGTHS[kind]
        count = context[name]
        return f"{words} {count} {singular if count == 1 else plural}"
    if kind in ("literal_error", "enum"):
        return f"one of {', '.join(choices(detail))}"
    if kind == "multiple_of":
        return f"a multiple of {context['multiple_of']:g}"
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    if kind in ("is_instance_of", "is_subclass_of", "callable_type"):
        name = str(context.get("class", ""))
        return _COLLECTIONS.get(name, f"""a {name or "function"}: {{"_target_": "package.module.Name", ...}}""")
    if kind == "union_tag_invalid":
        return f"one of {', '.join(_QUOTED.findall(context['expected_tags']))} as its name"
    if kind == "union_tag_not_found":
        return "a mapping with the key name"
    return str(detail["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")


def choices(detail: Mapping[str, Any]) -> list[str]:
    """Return the valid values of an error about one of several."""
    names = detail["ctx"]["expected"]
    return _QUOTED.findall(names) or re.split(r", | or ", names)


def first_problem(error: ValidationError) -> str:
    """Return the first problem as one line: key, value, what was expected."""
    detail = error.errors(include_url=False)[0]
    *parents, last = ["", *map(str, detail["loc"])]
    key = ".".join([*parents[1:], last])
    if detail["type"] == "missing":
        return f"{key}: needs a value"
    if detail["type"] == "extra_forbidden":
        return f"{key}: no such key"
    return f"{f'{key}: ' if key else ''}{quoted(key, detail['input'])}: expected {expected(detail)}"


def quoted(key: str, value: Any) -> str:
    """Return the value of a key as quoted in a problem, without secrets."""
    return MASK if is_secret(key) and isinstance(value, str) and value else mask_text(shortened(value))


def shortened(value: Any) -> str:
    """Return a value as quoted in a problem: its first characters, with secrets masked. A large value is never
    rendered whole."""
    text, length = [], 0
    for piece in _repr(value):
        text.append(piece)
        length += len(piece)
        if length > MAX_QUOTED:
            break
    masked = mask_text("".join(text))
    return masked if len(masked) <= MAX_QUOTED else masked[: MAX_QUOTED - 3] + "..."


def _repr(value: Any) -> Iterator[str]:
    """Yield the pieces of Python's repr, with `null`, `true` and `false` as in YAML and JSON. A long text is cut late
    enough to include a password inside a URL."""
    match value:
        case str():
            yield repr(value[: 20 * MAX_QUOTED])
        case list():
            yield "["
            for index, item in enumerate(value):
                yield ", " if index else ""
                yield from _repr(item)
            yield "]"
        case dict():
            yield "{"
            for index, (key, item) in enumerate(value.items()):
                yield ", " if index else ""
                yield from _repr(key)
                yield ": "
                yield from _repr(item)
            yield "}"
        case None | bool():
            yield {None: "null", True: "true", False: "false"}[value]
        case int() if value.bit_length() > 4 * MAX_QUOTED:
            yield f"an integer of {value.bit_length()} bits"
        case _:
            yield repr(value)
