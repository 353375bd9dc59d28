"""Conversion of a nested configuration to MLflow parameters: flat names, text values, within MLflow's limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_VALUE = 6000
"""Maximum length of a parameter value in characters (a limit of MLflow)."""
MAX_NAME = 250
"""Maximum length of the name of a parameter, metric or tag."""
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")


def clean_name(name: str) -> str:
    """Return the name with characters that MLflow rejects replaced by underscores, cut to `MAX_NAME`."""
    return _NOT_ALLOWED.sub("_", name)[:MAX_NAME]


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `{"a.b": "1"}` for `{"a": {"b": 1}}`. Lists become JSON text. Long values are cut, with a note."""
    return {clean_name(name): _shorten(_text(value)) for name, value in _leaves(config, "")}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, value


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple, Mapping)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _shorten(text: str) -> str:
    if len(text) <= MAX_VALUE:
        return text
    note = f" … [cut; {len(text):,} characters, whole in config.yaml]"
    return text[: MAX_VALUE - len(note)] + note
