"""Strict parsing of JSON from clients and servers, with bounded size.

The number of values and the nesting depth are counted before any object is created, in one pass over the bytes, so that
memory is proportional to the size of the body. Values that Python's parser accepts but other parts of the server do not
support are rejected: NaN and infinities, numbers that overflow a float, integers of thousands of digits, duplicate
keys, and lone surrogates, which are not valid Unicode.
"""

from __future__ import annotations

import json
import re
from typing import Any

from components.json_text import STRICT

MAX_VALUES = 200_000
"""Maximum number of values (numbers, strings, lists, objects) per document."""
MAX_DEPTH = 64
"""Maximum nesting depth."""
MAX_DIGITS = 400
"""Maximum number of characters of an integer: more than the range of a float needs."""

_TEXT = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)
"""A string. An unterminated string matches up to the end, so that no part of it is scanned twice."""
_BRACKET = re.compile(rb"[\[\]{}]")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(data: bytes, max_values: int = MAX_VALUES, *, surrogates: bool = False) -> Any:
    """Return the parsed document. Raises ValueError with a description of the problem. surrogates: accept lone
    surrogates, for callers that replace them."""
    check_structure(data, max_values)
    try:
        value = json.loads(data.decode(), parse_int=_int, **STRICT)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} (character {error.pos})") from None
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if not surrogates and _ESCAPED_SURROGATE.search(data):
        _check_text(value)
    return value


def check_structure(data: bytes, max_values: int = MAX_VALUES) -> None:
    """Raise ValueError if a document has too many values or levels."""
    structure = _TEXT.sub(b"", data)
    if _values(structure) > max_values:
        raise ValueError(f"it has more than {max_values} values")
    depth = 0
    for bracket in _BRACKET.finditer(structure):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def count_values(data: bytes) -> int:
    """Return the number of values of a document, or one or two more for each empty list or object."""
    return _values(_TEXT.sub(b"", data))


def _values(structure: bytes) -> int:
    return structure.count(b",") + structure.count(b"[") + structure.count(b"{") + 1


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _check_text(value: Any) -> None:
    """Raise ValueError if a string or a key has a lone surrogate."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(f"a text holds half of a surrogate pair (\\u{code:04x}), which is no Unicode") from None
