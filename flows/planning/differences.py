"""Differences between the settings of two stages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

MAX_LENGTH = 40
"""Maximum number of characters shown of a value."""


class Difference(NamedTuple):
    """Setting with two values, as text."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} → {self.after}"


def differences(before: Any, after: Any, path: str = "") -> Iterator[Difference]:
    """Yield the settings that differ between two parts of a spec."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*before, *(name for name in after if name not in before)]:
            below = f"{path}.{name}" if path else str(name)
            yield from differences(before.get(name, "–"), after.get(name, "–"), below)
    elif before != after:
        if path == "round":  # the spec counts rounds from 0, messages from 1
            before, after = before + 1, after + 1
        yield Difference(path, _text(before), _text(after))


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 3]}…"
