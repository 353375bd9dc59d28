"""Logs of SkyPilot and of its jobs, and the events of a stage in the lines of a job's log.

SkyPilot prefixes each line with `(NAME, pid=123) `, sometimes with colours, `rank=` or the name of a node, and adds
lines of its own and what the stage and its libraries write to standard error.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

LAST_LINES = 12
"""Lines of the log that are quoted for a job that ended without a result."""
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


class LineSplitter:
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


class LineLog(io.TextIOBase):
    """Text stream that forwards SkyPilot's output, line by line, to our log."""

    def __init__(self) -> None:
        self._lines = LineSplitter()

    def write(self, text: str) -> int:
        for line in self._lines.feed(text):
            self.line(line)
        return len(text)

    def line(self, line: str) -> None:
        logger.info("%s", line)


class JobLog(LineLog):
    """Log of a job: forwards its events, and keeps the result and the last lines. skip: number of events that an
    earlier reading of the same log has forwarded."""

    def __init__(self, say: Callable[[Mapping[str, Any]], None], skip: int) -> None:
        super().__init__()
        self._say = say
        self._skip = skip
        self.last: dict[str, Any] | None = None
        """Last event: result or error."""
        self.events = 0
        """Number of events before the last one."""
        self.lines: deque[str] = deque(maxlen=LAST_LINES)

    def line(self, line: str) -> None:
        data = event(line)
        if data is None:
            self.lines.append(line)
            super().line(line)
        elif "status" in data or "error" in data:
            self.last = data
        else:
            self.events += 1
            if self.events > self._skip:
                self._say(data)

    def finish(self) -> None:
        for line in self._lines.end():
            self.line(line)
