"""Real S3 server for tests: moto's, in a subprocess, and a connection to it that can be cut.

Run as a program it serves on a free port, which is its first line of output, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


class S3:
    """Server as a test sees it."""

    def __init__(self):
        here = Path(__file__)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_"))}
        self._process = subprocess.Popen(
            [sys.executable, str(here)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self):
        self._process.communicate(timeout=600)

    def client(self, service: str = "s3") -> Any:
        import boto3

        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="owner",
            aws_secret_access_key="owner",
        )

    def bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        self.client().create_bucket(Bucket=name)
        return name

    def user(self, *actions: str) -> dict[str, str]:
        """Return a user with this permission only, as environment variables."""
        import json

        iam, name = self.client("iam"), uuid.uuid4().hex
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="only", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    def enforce(self, permissions: bool):
        """Set whether the server checks identity and permissions."""
        count = b"0" if permissions else b"inf"
        request = urllib.request.Request(
            f"{self.url}/moto-api/reset-auth", data=count, headers={"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request, timeout=600).close()


class Wire:
    """TCP proxy in front of a server, through which a test can read, tamper, stall and cut."""

    def __init__(self, port: int):
        self._target = port
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.sent = 0
        """Bytes sent to the server."""
        self.limit: tuple[int, Callable[[], None]] | None = None
        """Callback after a number of bytes sent to the server; the bytes wait for its end."""
        self.tamper: Callable[[bytes], bytes] = lambda data: data
        """Function applied to the bytes from the server."""
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self):
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self):
        """Simulate an unreachable server: break connections and refuse new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()

    def _accept(self, listener: socket.socket):
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._open += [near, far]
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, to_server: bool):
        try:
            while data := source.recv(65536):
                if to_server:
                    self.sent += len(data)
                    if self.limit is not None and self.sent >= self.limit[0]:
                        _, action = self.limit
                        self.limit = None
                        action()
                target.sendall(data if to_server else self.tamper(data))
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one end is gone: the other is not to wait for it
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)


def serve():
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    MotoRequestHandler.disable_nagle_algorithm = True  # as in tests/conftest.py
    application = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def one_at_a_time(environ: Any, start_response: Any) -> Any:
        """S3 decides a conditional write atomically; moto checks first and then writes."""
        with lock:
            return application(environ, start_response)

    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=MotoRequestHandler)
    print(server.server_address[1], flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    import logging

    logging.disable()
    serve()
