"""Append-only files of a served policy: its answers, and the feedback of its users.

    {"id": "chatcmpl-1", "conversation": "conv-1", "time": 1764308000.1, "version": "3", "parent": null, "messages": …}
    {"feedback": "fb-1", "answer": "chatcmpl-1", "conversation": "conv-1", "time": 1764308900.0, "score": 1.0}

A line of an answer has the messages and the prompt tokens that its `parent`, an earlier line of the same file, does not
have. Feedback is appended to the file of its answer. So each file can be read, and deleted, by itself.

A line is written and synced under a lock that all processes share. The remainder of an interrupted write, which is
never read, is cut off by the next one. A file holds at most a day, and is deleted before its first line is older than
`RecordsSpec.days`. The folder belongs to its owner alone.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from components.artifacts import lock_file
from components.data.served.spec import DAY, RecordsSpec
from components.errors import ResourceError

Line = dict[str, Any]
FOLDER = "served"
"""Folder name below the run root."""
SUFFIX = ".served.jsonl"
LOCK_LIMIT = 30.0
"""Time limit in seconds to acquire the lock of the folder."""


@dataclass(frozen=True)
class Recorded:
    """Place of a recorded answer."""

    id: str
    conversation: str
    prompt: str
    """Digest of its prompt: answers to one prompt can be compared."""
    path: Path


class ServedLog:
    """Writer of the files in `folder`, which it creates. Thread-safe, and safe for concurrent processes.

    Raises ResourceError if other users can read the folder."""

    def __init__(self, folder: Path, spec: RecordsSpec | None = None):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode & 0o777
        if mode & 0o077:
            raise ResourceError(
                f"{folder} has mode {mode:04o}, so that others can read recorded conversations; expected 0700. Run: "
                f"chmod 700 {folder}"
            )
        self.folder = folder
        self.spec = spec or RecordsSpec()
        self._path: Path | None = None
        """File for the next answers."""
        self._lock = threading.Lock()
        self._read: dict[Path, int] = {}
        """Size up to which a file is indexed."""
        self._answers: dict[str, Recorded] = {}
        self._last: dict[str, str] = {}
        """Last answer of each conversation."""

    def append(self, lines_for: Callable[[str], Sequence[Line]]) -> str:
        """Write lines and return the name of their file, with which `lines_for` is called."""
        with self._locked():
            self._expire()
            path = self._path
            if path is None or not path.exists() or self._is_full(path):
                path = self._path = self.folder / f"{time.time():.6f}-{uuid.uuid4().hex[:8]}{SUFFIX}"
            _append(path, lines_for(path.name))
            return path.name

    def append_feedback(self, line: Line, answer: Recorded) -> bool:
        """Write a line to the file of an answer; return False if the file was deleted."""
        with self._locked():
            self._expire()
            if answer.path.exists():
                _append(answer.path, [line])
                return True
        return False

    def find(self, *, answer: str | None = None, conversation: str | None = None) -> Recorded | None:
        """Return an answer, or the last one of a conversation; None if it is unknown, or was deleted."""
        with self._locked():
            self._expire()
            self._index()
        return self._answers.get(self._last.get(conversation or "", "") if answer is None else answer)

    def expire(self) -> None:
        """Delete files as the spec demands. Raises WaitTimeout."""
        with self._locked():
            self._expire()

    def _expire(self) -> None:
        paths, now = files(self.folder), time.time()
        size = sum(path.stat().st_size for path in paths)
        for path in paths:
            excess = size > self.spec.megabytes * 2**20
            if now - began(path) < self.spec.days * DAY and not excess:
                break
            size -= path.stat().st_size
            path.unlink()

    def _is_full(self, path: Path) -> bool:
        old = time.time() - began(path) > self.spec.file_seconds
        return old or path.stat().st_size > self.spec.file_bytes

    def _index(self) -> None:
        """Read the lines that this or another process has added."""
        paths = files(self.folder)
        for gone in self._read.keys() - set(paths):
            del self._read[gone]
            self._answers = {name: answer for name, answer in self._answers.items() if answer.path != gone}
            self._last = {answer.conversation: answer.id for answer in self._answers.values()}
        for path in paths:
            for line, end in _lines(path, self._read.get(path, 0)):
                self._read[path] = end
                if "id" in line:
                    answer = Recorded(line["id"], line["conversation"], line["prompt"], path)
                    self._answers[answer.id], self._last[answer.conversation] = answer, answer.id

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock, locked(self.folder):
            yield


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder: no line is being written. Raises WaitTimeout."""
    with open(folder / ".lock", "a+") as file:
        lock_file(file, f"the conversations in {folder}", LOCK_LIMIT)
        yield


def files(folder: Path) -> list[Path]:
    """Return the files of recorded conversations in a folder, the oldest first."""
    return sorted(folder.glob(f"[0-9]*-*{SUFFIX}"), key=began)


def began(path: Path) -> float:
    """Return the time at which a file was begun, in seconds since the epoch."""
    return float(path.name.partition("-")[0])


def read(folder: Path, until: float = float("inf")) -> Iterator[Line]:
    """Yield the lines up to a time, the oldest file first. Lines that are damaged are left out."""
    for path in files(folder):
        yield from (line for line, _ in _lines(path, 0) if line["time"] <= until)


def _lines(path: Path, start: int) -> Iterator[tuple[Line, int]]:
    """Yield the complete lines from a position, each with the position of its end. A file that was deleted has none."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(start)
        for text in file:
            start += len(text)
            if text.endswith(b"\n"):
                with suppress(ValueError):
                    line = json.loads(text)
                    if isinstance(line, dict) and {"time", "conversation"} <= line.keys():
                        yield line, start


def _append(path: Path, lines: Sequence[Line]) -> None:
    """Write lines with the time. The caller holds the lock."""
    stamped = [{**line, "time": time.time()} for line in lines]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in stamped).encode()
    new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with open(descriptor, "r+b") as file:
        file.seek(_complete_end(file))
        file.truncate()
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if new:
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def _complete_end(file: BinaryIO) -> int:
    """Return the end of the last complete line."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - 1, 0))
    if not end or file.read(1) == b"\n":
        return end
    file.seek(0)
    return file.read().rfind(b"\n") + 1
