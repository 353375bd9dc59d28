"""Batched questions through OpenAI's Batch API: one file of questions, answered within a day, at half the price.

    POST /files             the questions, one JSON object a line     -> id of a file
    POST /batches           that file                                 -> id of a batch
    GET /batches/{id}       polled until it has ended                 -> ids of the files with answers and with errors
    GET /files/{id}/content

A batch is sent when no question has come for some seconds. The mapping from questions to batches is stored as soon as a
batch is sent. So after a kill, the same question, in this process or another, waits for that batch and costs nothing
again. Questions that a batch left unanswered are returned to the caller.
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

from components.bounded_reply import LIMITS, ReplyLimits
from components.errors import JudgeError, ResourceError
from components.json_client import Client
from components.json_reply import FailedAttempt, Reply, packed
from components.rewards.llm.cache import SentBatches, digest
from components.strict_json import check_structure

log = logging.getLogger(__name__)

BATCH_SHARE = 0.5
"""Share of the price that a batch costs."""
QUIET = 3.0
"""Seconds without a new question after which a batch is sent."""
MOST_QUESTIONS, MOST_BYTES = 50_000, 100_000_000
"""Limits of one batch; OpenAI accepts the same number of questions, and twice the bytes."""
MOST_ANSWER = 64 << 10
"""Bytes of a file of answers for each of its questions, on average."""
FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 5.0, 300.0, 1.3
"""Polling interval of a batch, in seconds: first, longest, and growth factor."""
LONGEST = 26 * 3600.0
"""Seconds after which waiting for a batch ends: batches expire after 24 hours."""
WINDOW = "24h"
ENDED = ("completed", "failed", "expired", "cancelled")


class Batches:
    """Batches of one server. waiting: callback that receives the batch being waited for, at each poll."""

    def __init__(self, client: Client, label: str, answers: Path | None, waiting: Callable[[str], None]):
        self._client = client
        self._label = label
        self._waiting = waiting
        self._sent = SentBatches(answers) if answers is not None else None
        self._pending: dict[str, bytes] = {}
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._replies: dict[str, asyncio.Future[Reply | None]] = {}
        """Future replies by question, of questions asked by this process."""
        self._fetched: dict[str, Reply] = {}
        """Replies of ended batches by question, including questions that this process has not asked yet."""
        self._awaited: set[str] = set()
        self._ended: set[str] = set()
        """Batches whose answers have been downloaded."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, question_digest: str, structured: str, body: Mapping[str, Any]) -> Reply | None:
        """Return the server's reply to a question; None if the batch left it unanswered. structured: form in which the
        answer is requested. Raises ResourceError, JudgeError."""
        name = digest([question_digest, self._client.url, structured])
        if name not in self._replies:
            self._replies[name] = asyncio.get_running_loop().create_future()
            batch = self._sent.of(name) if self._sent is not None else None
            if batch is None:
                self._enqueue(name, body)
            elif batch in self._ended:
                self._settle([name])
            elif batch not in self._awaited:
                log.info("batch %s of %s was sent by an earlier run: using its answers", batch, self._label)
                self._begin(self._fetch(batch, []), batch)
        return await asyncio.shield(self._replies[name])

    def close(self) -> None:
        """Delete the records of batches whose answers were all requested; an interrupted run may need the others."""
        if self._sent is None:
            return
        for batch in self._ended:
            if all(name in self._replies for name in self._sent.questions(batch)):
                self._sent.forget(batch)
        self._sent.close()

    def _begin(self, work: Coroutine[Any, Any, None], batch: str = "") -> None:
        self._awaited.add(batch)
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    def _enqueue(self, name: str, body: Mapping[str, Any]) -> None:
        row = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        self._pending[name] = packed(row)
        self._bytes += len(self._pending[name])
        if self._timer is not None:
            self._timer.cancel()
        if len(self._pending) >= MOST_QUESTIONS or self._bytes >= MOST_BYTES:
            self._send()
        else:
            self._timer = asyncio.get_running_loop().call_later(QUIET, self._send)

    def _send(self) -> None:
        rows, self._pending, self._bytes, self._timer = self._pending, {}, 0, None
        self._begin(self._start(rows))

    async def _start(self, rows: Mapping[str, bytes]) -> None:
        try:
            content, kind = _form(b"\n".join(rows.values()))
            file = await self._client.send("POST", "/files", content, _id, self._refused, kind)
            request = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": WINDOW}
            batch = await self._client.post("/batches", request, _id, self._refused)
            if self._sent is not None:
                self._sent.note(batch, list(rows))
        except Exception as error:  # noqa: BLE001  raised by the futures of the questions
            self._fail(rows, error)
        else:
            self._begin(self._fetch(batch, list(rows)), batch)

    async def _fetch(self, batch: str, names: list[str]) -> None:
        """Wait for a batch and set the replies of its questions. names: its questions, if known."""
        names = names or (self._sent.questions(batch) if self._sent is not None else [])
        try:
            ended = await self._wait_for(batch, len(names))
            for file in (ended.get("output_file_id"), ended.get("error_file_id")):
                if file:
                    limits = ReplyLimits(LIMITS.size + len(names) * MOST_ANSWER)
                    self._fetched |= await self._client.send(
                        "GET", f"/files/{file}/content", None, _replies, limits=limits
                    )
        except Exception as error:  # noqa: BLE001  as above
            self._fail(names, error)
            return
        if unanswered := sum(name not in self._fetched for name in names):
            log.warning(
                "batch %s of %s has no answer for %d of %d questions", batch, self._label, unanswered, len(names)
            )
        self._ended.add(batch)
        self._settle(names)

    async def _wait_for(self, batch: str, questions: int) -> dict[str, Any]:
        """Return the batch when it has ended; an empty dict if the server no longer knows it."""
        pause, deadline = FIRST_PAUSE, time.monotonic() + LONGEST
        while True:
            try:
                batch_data = await self._client.send("GET", f"/batches/{batch}", None, Reply.json, _unknown)
            except _Unknown:
                log.warning("%s no longer has batch %s", self._label, batch)
                return {}
            state, counts = batch_data.get("status"), batch_data.get("request_counts") or {}
            if state in ENDED:
                break
            if time.monotonic() > deadline:
                raise JudgeError(f"{self._label}: batch {batch} is still {state} after {LONGEST / 3600:.0f} hours")
            done = counts.get("completed") or 0
            self._waiting(f"batch {batch} of {self._label}: {done} of {questions} answered; it may take up to a day")
            await asyncio.sleep(pause)
            pause = min(GROWTH * pause, LONGEST_PAUSE)
        if state == "failed":
            if self._sent is not None:
                self._sent.forget(batch)
            messages = [str(error.get("message")) for error in (batch_data.get("errors") or {}).get("data") or []]
            raise ResourceError(
                f"{self._label} rejected batch {batch}: {'; '.join(messages)[:300] or 'no reason given'}. "
                "To ask one by one: reward.model.batch=false"
            )
        return batch_data

    def _settle(self, names: Iterable[str]) -> None:
        for name in names:
            future = self._replies.get(name)
            if future is not None and not future.done():
                future.set_result(self._fetched.get(name))

    def _fail(self, names: Iterable[str], error: Exception) -> None:
        for name in names:
            future = self._replies.get(name)
            if future is not None and not future.done():
                future.set_exception(error)

    def _refused(self, reply: Reply, text: str) -> Exception | None:
        if reply.status in (404, 405, 501):
            return ResourceError(f"{self._label} does not support batches ({text}); expected reward.model.batch=false")
        return None


class _Unknown(Exception):
    """The server has no such batch."""


def _unknown(reply: Reply, text: str) -> Exception | None:
    return _Unknown() if reply.status == 404 else None


def _form(rows: bytes) -> tuple[bytes, str]:
    """Return the multipart form that uploads a file of questions, and its content type."""
    border = uuid.uuid4().hex
    head = f"--{border}\r\nContent-Disposition: form-data; name="
    purpose = f'{head}"purpose"\r\n\r\nbatch\r\n'
    file = f'{head}"file"; filename="questions.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n'
    content = (purpose + file).encode() + rows + f"\r\n--{border}--\r\n".encode()
    return content, f"multipart/form-data; boundary={border}"


def _id(reply: Reply) -> str:
    identifier = reply.json().get("id")
    if not isinstance(identifier, str) or not identifier:
        raise FailedAttempt("an answer without an id", empty=True)
    return identifier


def _replies(reply: Reply) -> dict[str, Reply]:
    """Return the replies in a file, by question; lines without a reply are skipped."""
    replies = {}
    for line in reply.content.splitlines():
        try:
            check_structure(line)
            row = orjson.loads(line)
            response = row["response"]
            name, status, body = row["custom_id"], int(response["status_code"]), orjson.dumps(response["body"])
        except (ValueError, KeyError, TypeError):
            continue
        replies[name] = Reply(status, "", {}, body)
    return replies
