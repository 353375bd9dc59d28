"""Judge server on a real socket with OpenAI's chat completions and Batch API, and scripted misbehaviour.

    with judge_server([TOO_MANY, Reply()]) as server:       # the first request gets the first reply, and so on;
        ...                                                 # requests beyond the script get the right answer
    with judge_server(lambda asked: ...) as server:         # or a function returns the reply to a request

It finds the trajectories in the user's messages by the tags `<trajectory id="X">…</trajectory>`, as a model would. The
right answer scores each with `rate`: by default the number after `quality` in its text. `server.requests` records the
requests and their times. `judge_replies` has named misbehaviours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

BLOCK = re.compile(r'<\s*trajectory id=\\?"([^"\\]*)\\?"\s*>(.*?)<\s*/\s*trajectory\s*>', re.DOTALL | re.IGNORECASE)
"""Pattern of a trajectory, as lenient as a model: anything that looks like a closing tag is one."""
QUALITY = re.compile(r"quality (\d(?:\.\d+)?)")
UNMARKED = 0.5
"""Score of a trajectory whose text states no quality."""

Rate = Callable[[str, str], float]
"""Function of id and text of a trajectory that returns its score."""


def by_quality(_: str, text: str) -> float:
    match = QUALITY.search(text)
    return float(match[1]) if match else UNMARKED


@dataclass
class Asked:
    """Request for a judgement."""

    number: int
    """Index of the request, in the order of arrival."""
    body: dict[str, Any]
    headers: dict[str, str]
    """Headers, with names in lower case."""
    came: float
    """Time of arrival, by time.monotonic()."""
    tries: int
    """Number of earlier requests about the same trajectories."""
    scores: list[dict[str, Any]]
    """Right answer: trajectory_id, explanation and score of each trajectory."""

    @property
    def prompt(self) -> str:
        """Return the text of the user's messages."""
        return "\n".join(text(message) for message in self.body["messages"] if message["role"] == "user")

    @property
    def ids(self) -> list[str]:
        return [score["trajectory_id"] for score in self.scores]


@dataclass(frozen=True)
class Reply:
    """Reply to a request; the defaults give the right answer."""

    say: str | Callable[[Asked], str | None] | None = None
    """Content of the message; None gives the right scores as JSON."""
    status: int = 200
    error: tuple[str, str] = ("overloaded", "server_error")
    """Error message and code, for a status other than 200."""
    headers: dict[str, str] = field(default_factory=dict)
    after: float = 0.0
    """Delay of the answer, in seconds."""
    cut: Literal["no", "before", "amid"] = "no"
    """Point at which the connection is closed: before any data, or after half of the body."""
    raw: bytes | None = None
    """Raw body, in place of a completion."""
    finish: str = "stop"
    refusal: str | None = None
    usage: dict[str, Any] | None = field(default_factory=dict)
    """Usage fields that override the counted ones; None omits the usage."""


GOOD = Reply()
Script = Sequence[Reply] | Callable[[Asked], Reply]


class JudgeServer:
    """Judge server. batch_polls: number of polls before a batch ends. batch_end: its final status. key: API key that
    requests must have; None accepts all."""

    def __init__(
        self,
        script: Script = (),
        *,
        rate: Rate = by_quality,
        models: Sequence[str] = ("judge",),
        key: str | None = None,
        batch_polls: int = 2,
        batch_end: Literal["completed", "failed", "expired"] = "completed",
    ):
        self.requests: list[Asked] = []
        self.most_at_once = 0
        self.url = ""
        self.batches: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self._meet = (
            script if callable(script) else lambda asked: script[asked.number] if asked.number < len(script) else GOOD
        )
        self._rate = rate
        self._models = models
        self._key = key
        self._polls, self._end = batch_polls, batch_end
        self._about: Counter[tuple[str, ...]] = Counter()
        self._at_once = 0

    def most_within(self, seconds: float) -> int:
        """Return the maximum number of requests in any window of this length."""
        came = [request.came for request in self.requests]
        return max((sum(start <= came_at < start + seconds for came_at in came) for start in came), default=0)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28)
        app.add_routes(
            [
                web.get("/v1/models", self._list),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/files", self._upload),
                web.get("/v1/files/{id}/content", self._content),
                web.post("/v1/batches", self._start_batch),
                web.get("/v1/batches/{id}", self._look_at_batch),
                web.post("/v1/batches/{id}/cancel", self._cancel_batch),
            ]
        )
        return app

    # Chat completions

    async def _list(self, request: web.Request) -> web.Response:
        return self._unauthorized(request) or web.json_response(
            {"object": "list", "data": [{"id": name, "object": "model"} for name in self._models]}
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if error := self._unauthorized(request):
            return error
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            asked, reply = self._asked(await request.json(), request)
            if reply.after:
                await asyncio.sleep(reply.after)
            return await self._send(request, asked, reply)
        finally:
            self._at_once -= 1

    def _asked(self, body: dict[str, Any], request: web.Request) -> tuple[Asked, Reply]:
        """Record a request, and return it with its reply."""
        asked = Asked(len(self.requests), body, {}, time.monotonic(), 0, [])
        asked.headers = {name.lower(): value for name, value in request.headers.items()}
        blocks = {result[1]: result[2] for result in BLOCK.finditer(asked.prompt)}
        for name, text in blocks.items():
            score = self._rate(name, text)
            asked.scores.append({"trajectory_id": name, "explanation": f"It is worth {score:g}.", "score": score})
        about = tuple(sorted(blocks.values()))
        asked.tries = self._about[about]
        self._about[about] += 1
        self.requests.append(asked)
        return asked, self._met(asked)

    def _met(self, asked: Asked) -> Reply:
        if asked.body.get("model") not in self._models:
            error = (f"The model `{asked.body.get('model')}` does not exist.", "model_not_found")
            return Reply(status=404, error=error)
        return self._meet(asked)

    async def _send(self, request: web.Request, asked: Asked, reply: Reply) -> web.StreamResponse:
        data = body_of(asked, reply)
        if reply.cut == "no":
            headers = {"content-type": "application/json", **reply.headers}
            return web.Response(status=reply.status, body=data, headers=headers)
        assert request.transport is not None
        response = web.StreamResponse(status=reply.status, headers={"content-length": str(len(data))})
        if reply.cut == "amid":
            await response.prepare(request)
            await response.write(data[: len(data) // 2])
        request.transport.close()
        return response

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        if self._key is None or request.headers.get("authorization") == f"Bearer {self._key}":
            return None
        return failed(401, f"Incorrect API key provided: {request.headers.get('authorization')}.", "invalid_api_key")

    # Batches

    async def _upload(self, request: web.Request) -> web.Response:
        if error := self._unauthorized(request):
            return error
        form = await request.post()
        file = form.get("file")
        if form.get("purpose") != "batch" or not isinstance(file, web.FileField):
            return failed(400, "purpose=batch and a file are required", "invalid_request_error")
        data = file.file.read()
        described = {"object": "file", "bytes": len(data), "filename": file.filename, "purpose": "batch"}
        return web.json_response({"id": self._keep(data), **described, "status": "processed"})

    async def _content(self, request: web.Request) -> web.Response:
        if error := self._unauthorized(request):
            return error
        data = self.files.get(request.match_info["id"])
        return failed(404, "No such File object", "not_found") if data is None else web.Response(body=data)

    async def _start_batch(self, request: web.Request) -> web.Response:
        if error := self._unauthorized(request):
            return error
        parameters = await request.json()
        source = self.files.get(parameters.get("input_file_id"))
        expected = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        if source is None or any(parameters.get(name) != value for name, value in expected.items()):
            return failed(400, f"an input_file_id and {expected} are required", "invalid_request_error")
        batch = {
            "id": f"batch_{len(self.batches) + 1}",
            "object": "batch",
            **parameters,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "errors": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }
        self.batches[batch["id"]] = batch | {"looked": 0, "request": request}
        return web.json_response(batch)

    async def _look_at_batch(self, request: web.Request) -> web.Response:
        if error := self._unauthorized(request):
            return error
        if (batch := self.batches.get(request.match_info["id"])) is None:
            return failed(404, "No batch found", "not_found")
        batch["looked"] += 1
        if batch["status"] in ("validating", "in_progress"):
            batch["status"] = "in_progress"
            if batch["looked"] > self._polls:
                self._finish(batch)
        return web.json_response(public(batch))

    async def _cancel_batch(self, request: web.Request) -> web.Response:
        if error := self._unauthorized(request):
            return error
        if (batch := self.batches.get(request.match_info["id"])) is None:
            return failed(404, "No batch found", "not_found")
        batch["status"] = "cancelled"
        return web.json_response(public(batch))

    def _finish(self, batch: dict[str, Any]) -> None:
        """Answer the lines of a batch, in reversed order; of an expiring batch only every second line."""
        lines = [json.loads(line) for line in self.files[batch["input_file_id"]].splitlines() if line.strip()]
        problem = wrong_lines(lines) or ("it was refused" if self._end == "failed" else "")
        if problem:
            batch |= {"status": "failed", "errors": {"object": "list", "data": [{"message": problem}]}}
            return
        good: list[dict[str, Any]] = []
        bad: list[dict[str, Any]] = []
        for number, line in enumerate(lines):
            result = {"id": f"batch_req_{number}", "custom_id": line["custom_id"], "response": None, "error": None}
            if self._end == "expired" and number % 2:
                error = {"code": "batch_expired", "message": "This request could not be executed in time."}
                bad.append(result | {"error": error})
                continue
            asked, reply = self._asked(line["body"], batch["request"])
            body = json.loads(body_of(asked, reply))
            result["response"] = {"status_code": reply.status, "request_id": f"req_{number}", "body": body}
            (good if reply.status == 200 else bad).append(result)
        for name, results in (("output_file_id", good), ("error_file_id", bad)):
            if results:
                batch[name] = self._keep(b"\n".join(json.dumps(result).encode() for result in reversed(results)))
        counts = {"total": len(lines), "completed": len(good), "failed": len(bad)}
        batch |= {"status": self._end, "request_counts": counts}

    def _keep(self, data: bytes) -> str:
        name = f"file-{len(self.files) + 1}"
        self.files[name] = data
        return name


def body_of(asked: Asked, reply: Reply) -> bytes:
    if reply.raw is not None:
        return reply.raw
    if reply.status != 200:
        message, code = reply.error
        return json.dumps({"error": {"message": message, "type": code, "param": None, "code": code}}).encode()
    content_source = json.dumps({"scores": asked.scores}) if reply.say is None else reply.say
    content = content_source(asked) if callable(content_source) else content_source
    prompt, answer = sum(len(text(message)) for message in asked.body["messages"]) // 4, len(content or "") // 4
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    message = {"role": "assistant", "content": None if reply.refusal else content, "refusal": reply.refusal}
    completion = {
        "id": f"chatcmpl-{asked.number}",
        "object": "chat.completion",
        "created": 0,
        "model": asked.body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": reply.finish}],
    }
    return json.dumps(completion if reply.usage is None else completion | {"usage": usage | reply.usage}).encode()


def text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def failed(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": code, "param": None, "code": code}}, status=status)


def public(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in ("looked", "request")}


def wrong_lines(lines: list[dict[str, Any]]) -> str:
    """Return the reason why a provider rejects a whole batch; empty if it accepts it."""
    named = Counter(line.get("custom_id") for line in lines)
    if not lines or None in named or max(named.values()) > 1:
        return "every line needs a custom_id of its own"
    if any((line.get("method"), line.get("url")) != ("POST", "/v1/chat/completions") for line in lines):
        return "every line needs method POST and the url of the batch's endpoint"
    return ""


@contextlib.contextmanager
def judge_server(script: Script = (), **options: Any) -> Iterator[JudgeServer]:
    server = JudgeServer(script, **options)
    with served(server.app()) as url:
        server.url = f"{url}/v1"
        yield server


@contextlib.contextmanager
def served(app: web.Application) -> Iterator[str]:
    """Run an application in a thread, and yield its address."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    ready: Future[str] = Future()

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def work() -> None:
        ready.set_result(loop.run_until_complete(start()))  # a stop before this would not reach `run_forever`
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield ready.result(600)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
