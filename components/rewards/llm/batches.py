"""Questions in batches, by OpenAI's Batch API: one file of them, answered within a day, at half the price.

    POST /files             the questions, one JSON object a line     -> id of a file
    POST /batches           that file                                 -> id of a batch
    GET /batches/{id}       now and then, until it has ended          -> ids of the files with answers and with errors
    GET /files/{id}/content

Questions are gathered until none has come for some seconds. Which batch holds which question is written down as soon as
it is sent: whoever asks the same after a kill, in this process or another, waits for that batch and pays nothing again.
What a batch did not answer is left to whoever asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from components.errors import JudgeError, ResourceError
from components.json_client import Client, Failed, Reply, packed
from components.rewards.llm.cache import SentBatches

log = logging.getLogger(__name__)

BATCH_SHARE = 0.5
"""Of the price."""
QUIET = 3.0
"""Seconds without a further question after which a batch is sent."""
MOST_QUESTIONS, MOST_BYTES = 50_000, 100_000_000
"""Of one batch; OpenAI takes as many questions, and twice the bytes."""
FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 5.0, 300.0, 1.3
"""Seconds between two looks at a batch."""
LONGEST = 26 * 3600.0
"""Seconds after which a batch is not waited for any more: those that are not done have expired after 24 hours."""
WINDOW = "24h"
ENDED = ("completed", "failed", "expired", "cancelled")


class Batches:
    """Of one server. waiting: told which batch is waited for, at each look at it."""

    def __init__(self, client: Client, who: str, answers: Path | None, waiting: Callable[[str], None]):
        self._client = client
        self._who = who
        self._waiting = waiting
        self._sent = SentBatches(answers) if answers is not None else None
        self._gathered: dict[str, bytes] = {}
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._replies: dict[str, asyncio.Future[Reply | None]] = {}
        """By question, of those that were asked here."""
        self._found: dict[str, Reply] = {}
        """Of batches that have ended; also what was not asked here yet."""
        self._awaited: set[str] = set()
        self._ended: set[str] = set()
        """Batches whose answers are here."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, name: str, body: Mapping[str, Any]) -> Reply | None:
        """What the server said to a question; None where the batch did not get to it. name: of the question. Raises
        ResourceError, JudgeError."""
        if name not in self._replies:
            self._replies[name] = asyncio.get_running_loop().create_future()
            batch = self._sent.of(name) if self._sent is not None else None
            if batch is None:
                self._gather(name, body)
            elif batch in self._ended:
                self._settle([name])
            elif batch not in self._awaited:
                log.info("batch %s of %s was sent before: its answers are taken", batch, self._who)
                self._begin(self._fetch(batch, []), batch)
        return await asyncio.shield(self._replies[name])

    def close(self) -> None:
        """Forgets the batches of which every answer was asked for; the others may be wanted by the next try."""
        if self._sent is None:
            return
        for batch in self._ended:
            if all(name in self._replies for name in self._sent.questions(batch)):
                self._sent.forget(batch)
        self._sent.close()

    def _begin(self, work: Coroutine[Any, Any, None], batch: str = "") -> None:
        self._awaited.add(batch)
        task = asyncio.create_task(work)
        self._tasks.add(task)  # one that nobody holds may vanish
        task.add_done_callback(self._tasks.discard)

    def _gather(self, name: str, body: Mapping[str, Any]) -> None:
        row = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        self._gathered[name] = packed(row)
        self._bytes += len(self._gathered[name])
        if self._timer is not None:
            self._timer.cancel()
        if len(self._gathered) >= MOST_QUESTIONS or self._bytes >= MOST_BYTES:
            self._send()
        else:
            self._timer = asyncio.get_running_loop().call_later(QUIET, self._send)

    def _send(self) -> None:
        rows, self._gathered, self._bytes, self._timer = self._gathered, {}, 0, None
        self._begin(self._start(rows))

    async def _start(self, rows: Mapping[str, bytes]) -> None:
        try:
            content, kind = _form(b"\n".join(rows.values()))
            file = await self._client.send("POST", "/files", content, _id, self._refused, kind)
            asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": WINDOW}
            batch = await self._client.post("/batches", asked, _id, self._refused)
            if self._sent is not None:
                self._sent.note(batch, list(rows))
        except Exception as error:  # noqa: BLE001  it is raised where it is waited for
            self._fail(rows, error)
        else:
            self._begin(self._fetch(batch, list(rows)), batch)

    async def _fetch(self, batch: str, names: list[str]) -> None:
        """Waits for a batch, and gives its answers to who asked. names: of its questions, where they are known."""
        names = names or (self._sent.questions(batch) if self._sent is not None else [])
        try:
            ended = await self._end(batch, len(names))
            for file in (ended.get("output_file_id"), ended.get("error_file_id")):
                if file:
                    self._found |= await self._client.send("GET", f"/files/{file}/content", None, _replies)
        except Exception as error:  # noqa: BLE001  as above
            self._fail(names, error)
            return
        if left := sum(name not in self._found for name in names):
            log.warning("batch %s of %s has no answer for %d of %d questions", batch, self._who, left, len(names))
        self._ended.add(batch)
        self._settle(names)

    async def _end(self, batch: str, questions: int) -> dict[str, Any]:
        """The batch when it has ended; nothing of one that the server does not know any more."""
        pause, deadline = FIRST_PAUSE, time.monotonic() + LONGEST
        while True:
            try:
                found = await self._client.send("GET", f"/batches/{batch}", None, Reply.json, _unknown)
            except _Unknown:
                log.warning("%s does not know batch %s any more", self._who, batch)
                return {}
            state, counts = found.get("status"), found.get("request_counts") or {}
            if state in ENDED:
                break
            if time.monotonic() > deadline:
                raise JudgeError(f"{self._who}: batch {batch} is still {state} after {LONGEST / 3600:.0f} hours")
            done = counts.get("completed") or 0
            self._waiting(f"batch {batch} of {self._who}: {done} of {questions} answered; it may take up to a day")
            await asyncio.sleep(pause)
            pause = min(GROWTH * pause, LONGEST_PAUSE)
        if state == "failed":
            if self._sent is not None:
                self._sent.forget(batch)
            said = [str(one.get("message")) for one in (found.get("errors") or {}).get("data") or []]
            raise ResourceError(
                f"{self._who} refuses batch {batch}: {'; '.join(said)[:300] or 'it does not say why'}. To ask one by "
                "one: reward.model.batch=false"
            )
        return found

    def _settle(self, names: Iterable[str]) -> None:
        for name in names:
            future = self._replies.get(name)
            if future is not None and not future.done():
                future.set_result(self._found.get(name))

    def _fail(self, names: Iterable[str], error: Exception) -> None:
        for name in names:
            future = self._replies.get(name)
            if future is not None and not future.done():
                future.set_exception(error)

    def _refused(self, reply: Reply, text: str) -> Exception | None:
        if reply.status in (404, 405, 501):
            return ResourceError(f"{self._who} takes no batches ({text}); expected reward.model.batch=false")
        return None


class _Unknown(Exception):
    """There is no such batch."""


def _unknown(reply: Reply, text: str) -> Exception | None:
    return _Unknown() if reply.status == 404 else None


def _form(rows: bytes) -> tuple[bytes, str]:
    """A file of questions as it is uploaded, and the type of that."""
    border = uuid.uuid4().hex
    head = f"--{border}\r\nContent-Disposition: form-data; name="
    purpose = f'{head}"purpose"\r\n\r\nbatch\r\n'
    file = f'{head}"file"; filename="questions.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n'
    content = (purpose + file).encode() + rows + f"\r\n--{border}--\r\n".encode()
    return content, f"multipart/form-data; boundary={border}"


def _id(reply: Reply) -> str:
    found = reply.json().get("id")
    if not isinstance(found, str) or not found:
        raise Failed("an answer without an id", empty=True)
    return found


def _replies(reply: Reply) -> dict[str, Reply]:
    """The answers of a file, by question; what has none is left out."""
    found = {}
    for line in reply.content.splitlines():
        try:
            row = orjson.loads(line)
            given = row["response"]
            name, status, body = row["custom_id"], int(given["status_code"]), orjson.dumps(given["body"])
        except (ValueError, KeyError, TypeError):
            continue
        found[name] = Reply(status, "", {}, body)
    return found
