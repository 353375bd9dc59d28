"""The events of a stage, found among the lines of a job's log.

SkyPilot puts `(NAME, pid=123) ` before each line, sometimes with colours, `rank=` or the name of a node, and mixes in
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
    """The event in a line of the log; None where there is none."""
    for start in _EVENT.finditer(line):
        try:
            data, _ = _DECODER.raw_decode(line, start.start())
        except ValueError:  # half of one: the log was cut there
            continue
        if set(data) in _KEYS:
            return data
    return None


def plain(text: str) -> str:
    """Without colours."""
    return _COLOURS.sub("", text)


class Lines:
    """Text that comes in pieces, as whole lines without colours."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> Iterator[str]:
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        for line in lines:
            if clean := plain(line).rstrip():
                yield clean

    def end(self) -> Iterator[str]:
        """What came after the last end of a line."""
        yield from self.feed("\n")
