"""Our server in a process of its own, to be attacked: its answers, its memory, and whether `/health` goes on."""

from __future__ import annotations

import contextlib
import http.client
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
MEMORY = 3 << 30
"""Bytes of private memory that the process may ask for: an attack that succeeds fails in it, not on the machine."""
MB = 1 << 20


class Victim:
    """A running server. status 0 in its answers: the connection was closed without one."""

    def __init__(self, process: subprocess.Popen, port: int):
        self.process = process
        self.family = psutil.Process(process.pid)
        self.port = port

    def send(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, timeout: float = 60
    ) -> tuple[int, bytes]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read all
                connection.request(method, path, body, {"content-type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            return response.status, response.read()
        except (http.client.BadStatusLine, http.client.IncompleteRead, ConnectionError):
            return 0, b""
        finally:
            connection.close()

    def send_raw(self, data: bytes, timeout: float = 60, close: bool = False) -> tuple[int, bytes]:
        """Bytes as they are. close: the sending side is closed after them, as by a client that is cut off."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            received = b""
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
                if close:
                    connection.shutdown(socket.SHUT_WR)
                while chunk := connection.recv(65536):
                    received += chunk
                    head, end, rest = received.partition(b"\r\n\r\n")
                    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                    if end and length and len(rest) >= int(length[0].split(b":")[1]):
                        break
            return (int(received.split(b" ", 2)[1]) if received.startswith(b"HTTP/") else 0), received

    def memory(self, name: str = "VmRSS") -> float:
        """MB resident; VmHWM: the most since `reset_peak`."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith(f"{name}:")]
        return int(line.split()[1]) / 1024

    def family_memory(self) -> float:
        """MB resident of the process and its children."""
        total, command = self.family.memory_info().rss, self.family.cmdline()
        for child in self.family.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                memory = child.memory_info().rss
                if child.cmdline() != command:  # until it executes its program, it shares the memory of its parent
                    total += memory
        return total / MB

    def reset_peak(self) -> float:
        """Forgets the peak; returns what is resident now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.memory()


@contextlib.contextmanager
def victim(model: Path, adapters: Path, log: Path, *options: str) -> Iterator[Victim]:
    """Starts `python -m components.inference.server` on a free port of this machine."""
    command = [sys.executable, "-m", "components.inference.server", str(model), "--port", "0", "--name", "tiny"]
    command += ["--adapters", str(adapters), "--max-length", "512", *options]

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))

    with open(log, "wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stderr=output, preexec_fn=bounded)
    try:
        deadline = time.monotonic() + 600
        while "serving " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        line = next(line for line in log.read_text().splitlines() if line.startswith("serving "))
        yield Victim(process, int(line.split(":")[2].split("/")[0]))
    finally:
        process.kill()
        process.wait()


class Pulse:
    """Asks for `/health` again and again while the `with` block runs; with a body, for a completion."""

    def __init__(self, server: Victim, patience: float = 20.0, body: bytes | None = None):
        self.slowest = 0.0
        """Seconds."""
        self.most_memory = 0.0
        """Highest `Victim.family_memory`."""
        self._request = ("GET", "/health", b"") if body is None else ("POST", "/v1/chat/completions", body)
        self.failed: list[str] = []
        self.answers = 0
        self._server = server
        self._patience = patience
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            try:
                status, text = self._server.send(*self._request, timeout=self._patience)
                if status != 200:
                    self.failed.append(f"{status} {text[:200]!r}")
            except OSError as error:
                self.failed.append(f"{type(error).__name__} after {time.monotonic() - began:.1f} s")
            self.answers += 1
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.most_memory = max(self.most_memory, self._server.family_memory())
            self._over.wait(0.05)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2 * self._patience)
        assert not self._thread.is_alive()
