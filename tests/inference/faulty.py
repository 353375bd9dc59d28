"""A proxy that injects faults between client and server, over real sockets."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Fault = Callable[[BaseHTTPRequestHandler], None]
"""A fault that replaces the response to a request."""


def status(code: int, message: str = "overloaded", **headers: str) -> Fault:
    """An error with a status, as OpenAI's servers send it."""
    text = json.dumps({"error": {"message": message, "type": "server_error", "code": None}})
    return answer(text, code, {name.replace("_", "-"): value for name, value in headers.items()})


def answer(text: str, code: int = 200, headers: dict[str, str] | None = None) -> Fault:
    def send(handler: BaseHTTPRequestHandler) -> None:
        data = text.encode()
        handler.send_response(code)
        for name, value in {**(headers or {}), "content-length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    return send


def completion(message: dict, **choice: object) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop", **choice}]})


def cut(handler: BaseHTTPRequestHandler) -> None:
    """Half an answer, then the connection is closed."""
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"mess')
    handler.close_connection = True


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """No answer at all."""
    handler.close_connection = True


EMPTY = answer(completion({"content": None}, token_ids=[], logprobs={"content": []}))


PASSED_ON = ("accept", "authorization", "content-type", "mcp-protocol-version", "mcp-session-id")
"""Headers."""


class Line:
    """Stands before the server at `target` (a base URL): each request meets the next of `faults`, None being none, and
    is passed on where there are no more. Without a target, a request that meets no fault is answered with 404.

    `attempts` holds lists of faults: the n-th distinct request takes list n (modulo their number), and its own attempts
    meet the faults of that list in order, whatever other requests arrive in between."""

    def __init__(
        self,
        target: str | None = None,
        faults: Iterable[Fault | None] = (),
        attempts: Sequence[Sequence[Fault]] = (),
        port: int = 0,
    ):
        self.target = target
        self.faults: Iterator[Fault | None] = iter(faults)
        self.attempts = attempts
        self._left: dict[bytes, Iterator[Fault]] = {}
        self.seen: list[dict] = []
        """Bodies of all requests, those that met a fault too."""
        self.headers: list[dict[str, str]] = []
        self._lock = threading.Lock()
        line = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                line.meet(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that is gone
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Line:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def meet(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        with self._lock:
            fault = self._fault(body) if handler.command == "POST" else None
            if handler.command == "POST":
                self.seen.append(json.loads(body))
                self.headers.append({name.lower(): value for name, value in handler.headers.items()})
        if fault is not None:
            fault(handler)
        elif self.target is None:
            status(404, "nothing is here")(handler)
        else:
            self._pass_on(handler, body)

    def _fault(self, body: bytes) -> Fault | None:
        if not self.attempts:
            return next(self.faults, None)
        number = len(self._left)
        return next(self._left.setdefault(body, iter(self.attempts[number % len(self.attempts)])), None)

    def _pass_on(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        parts = urlsplit(self.target or "")
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
        try:
            headers = {name: value for name, value in handler.headers.items() if name.lower() in PASSED_ON}
            connection.request(handler.command, handler.path, body, headers)
            got = connection.getresponse()
            headers = {name: value for name, value in got.getheaders() if name.lower() in PASSED_ON}
            answer(got.read().decode(), got.status, headers)(handler)
        finally:
            connection.close()
