"""Malformed JSON bodies, made from a valid one: each field replaced by each odd value, and rubbish."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from tests.inference.malformed import KEYS, NUMBERS, RAW, STRINGS

MARK = "@MARK@"
VALUES = [json.dumps(value) for value in (*STRINGS[::4], *NUMBERS[::8], None, True, [], {}, [[]], {"": {}}, ["x"])]
RUBBISH = [
    b"", b"{", b"null", b"[]", b"0", b"\xff\xfe", b"{" * 100_000, b"[" * 100_000, b'{"a":' * 5_000,
    b'{"id":1,"id":2}', b"[" + b"[]," * 300_000 + b"[]]",
]  # fmt: skip


def malformed_bodies(valid: dict[str, Any]) -> Iterator[bytes]:
    """Yield bodies; some are valid by chance."""
    yield from RUBBISH
    for key in KEYS:
        yield json.dumps({**valid, key: 1}).encode()
    for path in _paths(valid):
        body = copy.deepcopy(valid)
        *parents, last = path
        holder: Any = body
        for key in parents:
            holder = holder[key]
        holder[last] = MARK
        text = json.dumps(body)
        for value in (*VALUES, *RAW):
            yield text.replace(f'"{MARK}"', value).encode("utf-8", "surrogatepass")
        del holder[last]
        yield json.dumps(body).encode()


def _paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from _paths(inner, (*path, key))
