"""Requests of clients and their results, on disk. A request is written before the client learns its id, and a result
before the client gets it. So a client that asks again, with the same number, gets the same answer, from this process or
from the next one.

    requests/OWNER/NUMBER.request   kind and body       requests/OWNER/NUMBER.result   media type and content

OWNER is the id of a model or of a sampling session.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components.json_text import parse_json

FAILED = "failed"
"""Media type of the result of a request that failed."""


@dataclass(frozen=True)
class Result:
    """Result of a request."""

    media_type: str
    content: bytes


class Journal:
    """Requests and results below a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def add(self, owner: str, number: int, kind: str, body: bytes) -> None:
        """Write a request."""
        self._write(owner, number, "request", kind, body)

    def finish(self, owner: str, number: int, result: Result) -> None:
        """Write a result."""
        self._write(owner, number, "result", result.media_type, result.content)

    def request(self, owner: str, number: int) -> tuple[str, bytes] | None:
        """Return kind and body of a request; None if there is none."""
        return self._read(owner, number, "request")

    def result(self, owner: str, number: int) -> Result | None:
        """Return the result of a request; None before its end."""
        read = self._read(owner, number, "result")
        return None if read is None else Result(*read)

    def numbers(self, owner: str, suffix: str = "request") -> list[int]:
        """Return the numbers of the requests of an owner, in order; or those that have a `result`."""
        return sorted(int(path.stem) for path in (self._folder / owner).glob(f"*.{suffix}"))

    def owners(self) -> Iterator[str]:
        """Yield the owners of requests."""
        if self._folder.is_dir():
            yield from sorted(path.name for path in self._folder.iterdir() if path.is_dir())

    def _write(self, owner: str, number: int, suffix: str, head: str, body: bytes) -> None:
        path = self._folder / owner / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(json.dumps(head).encode() + b"\n" + body)
        os.replace(part, path)

    def _read(self, owner: str, number: int, suffix: str) -> tuple[str, bytes] | None:
        try:
            head, _, body = (self._folder / owner / f"{number}.{suffix}").read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return str(parse_json(head)), body
