"""HTTP servers of tests, which answer as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = Callable[[str, str, bytes, Message], tuple[int, Any]]
"""From the method, the path, the body and the headers of a request: the status, and a page (bytes) or JSON data."""


class HttpServer:
    """Server on this machine, in threads, until it is closed. A subclass may have `answer` as a method."""

    answer: Answer

    def __init__(self, answer: Answer | None = None):
        if answer is not None:
            self.answer = answer
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # an answer is sent whole

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                status, content = server.answer(self.command, self.path, body, self.headers)
                page = isinstance(content, bytes)
                data = content if page else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-type", "text/html" if page else "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = _answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
