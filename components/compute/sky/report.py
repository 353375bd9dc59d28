"""Extraction of a stage's events from the lines of a job's log.

SkyPilot prefixes each line with `(NAME, pid=123) `, sometimes with colours, `rank=` or the name of a node, and adds
lines of its own and what the stage and its libraries write to standard error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_EVENT = re.compile(r'\{"(progress|waiting|key|error)": ')
_KEYS = ({"progress"}, {"waiting"}, {"key", "digest", "status"}, {"error"})
_DECODER = json.JSONDecoder()


def event(line: str) -> dict[str, Any] | None:
    """Return the event in a line of the log; None without one."""
    for start in _EVENT.finditer(line):
        try:
            data, _ = _DECODER.raw_decode(line, start.start())
        except ValueError:  # truncated: the log was cut there
            continue
        if set(data) in _KEYS:
            return data
    return None


def plain(text: str) -> str:
    """Return a text without colours."""
    return _COLOURS.sub("", text)


class Lines:
    """Splitter of streamed text into whole lines without colours."""

    def __init__(self) -> None:
        self._partial = ""

    def feed(self, text: str) -> Iterator[str]:
        *lines, self._partial = (self._partial + text).replace("\r", "\n").split("\n")
        for line in lines:
            if clean := plain(line).rstrip():
                yield clean

    def end(self) -> Iterator[str]:
        """Yield the last, unterminated line."""
        yield from self.feed("\n")
