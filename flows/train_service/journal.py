"""Requests of clients and their results, on disk. A request is written before the client learns its id, and a result
before the client gets it. So a client that asks again, with the same number, gets the same answer, from this process or
from the next one.

    SESSION/requests/OWNER/NUMBER.request   kind, digest and body     NUMBER.result   media type and content

OWNER is the id of a model or of a sampling session. The body of a request is dropped when it will not be computed
again; its digest remains, and its result until the session is deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
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


@dataclass(frozen=True)
class StoredRequest:
    """Request of a client. body: empty if it was dropped."""

    kind: str
    digest: str
    body: bytes

    @classmethod
    def of(cls, kind: str, body: bytes) -> StoredRequest:
        """Return a new request."""
        return cls(kind, hashlib.sha256(body).hexdigest(), body)


class Journal:
    """Requests and results below a folder of sessions."""

    def __init__(self, folder: Path):
        self._folder = folder

    def add(self, owner: str, number: int, request: StoredRequest) -> None:
        """Write a request."""
        self._write(owner, number, "request", [request.kind, request.digest], request.body)

    def drop(self, owner: str, number: int) -> None:
        """Drop the body of a request, if there is one."""
        if (request := self.request(owner, number)) is not None and request.body:
            self._write(owner, number, "request", [request.kind, request.digest], b"")

    def remove(self, owner: str, number: int) -> None:
        """Remove a request whose result cannot be written, so that the next process does not compute it."""
        with suppress(OSError):
            (self._of(owner) / f"{number}.request").unlink()

    def finish(self, owner: str, number: int, result: Result) -> None:
        """Write a result."""
        self._write(owner, number, "result", [result.media_type], result.content)

    def request(self, owner: str, number: int) -> StoredRequest | None:
        """Return a request; None if there is none."""
        if (read := self._read(owner, number, "request")) is None:
            return None
        (kind, digest), body = read
        return StoredRequest(kind, digest, body)

    def result(self, owner: str, number: int) -> Result | None:
        """Return the result of a request; None before its end."""
        read = self._read(owner, number, "result")
        return None if read is None else Result(read[0][0], read[1])

    def numbers(self, owner: str, suffix: str = "request") -> list[int]:
        """Return the numbers of the requests of an owner, in order; or those that have a `result`."""
        return sorted(int(path.stem) for path in self._of(owner).glob(f"*.{suffix}"))

    def owners(self) -> Iterator[str]:
        """Yield the owners of requests."""
        yield from sorted(path.name for path in self._folder.glob("*/requests/*"))

    def _of(self, owner: str) -> Path:
        return self._folder / owner.partition(":")[0] / "requests" / owner

    def _write(self, owner: str, number: int, suffix: str, head: list[str], body: bytes) -> None:
        path = self._of(owner) / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(json.dumps(head).encode() + b"\n" + body)
        os.replace(part, path)

    def _read(self, owner: str, number: int, suffix: str) -> tuple[list[str], bytes] | None:
        try:
            head, _, body = (self._of(owner) / f"{number}.{suffix}").read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return parse_json(head), body
