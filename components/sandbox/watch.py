"""Reads what a program prints, looks at what it uses, and ends it."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from components.sandbox.calls import Calls
from components.sandbox.limits import Limits

HOME = "/home/agent"
"""Where a program starts, and the only place where it can write; `/tmp` is a folder in it."""

_MB = 1024 * 1024
_LOOK = 0.02
"""Seconds between two looks at what a program uses."""
_FLOOD = 64
"""Times the kept output that a program may print."""


class Kept:
    """Beginning and end of what a program prints."""

    def __init__(self, limit: int):
        self.half = limit // 2
        self.first, self.last, self.size = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = self.half - len(self.first)
        self.first += data[:room]
        self.last += data[room:] if room else data
        del self.last[: -self.half]

    @property
    def cut(self) -> int:
        """Bytes that are left out."""
        return self.size - len(self.first) - len(self.last)

    def text(self) -> str:
        if not self.cut:
            return (self.first + self.last).decode(errors="replace")
        mark = f"\n[... {self.cut} bytes cut ...]\n"
        return self.first.decode(errors="replace") + mark + self.last.decode(errors="replace")


def watch(
    process: subprocess.Popen[bytes],
    limits: Limits,
    began: float,
    stop: threading.Event | None,
    calls: Calls | None = None,
) -> tuple[str, list[Kept]]:
    """Reads what the program prints until it ends, or a reason to kill it. Time in which it waits for the answer to a
    call does not count."""
    assert process.stdout is not None
    assert process.stderr is not None
    kept = [Kept(limits.output_bytes), Kept(limits.output_bytes)]
    most, next_look, killed = _FLOOD * limits.output_bytes, began, ""
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        ended = os.pidfd_open(process.pid)
        stack.callback(os.close, ended)
        selector.register(ended, selectors.EVENT_READ)
        for pipe, sink in zip((process.stdout, process.stderr), kept, strict=True):
            stack.enter_context(pipe)
            selector.register(pipe, selectors.EVENT_READ, sink)
        alive = True
        while alive or len(selector.get_map()) > 0:
            for key, _ in selector.select(_LOOK):
                if key.data is None:
                    selector.unregister(ended)
                    alive = False
                    kill(process)
                elif data := os.read(key.fd, 65536):
                    key.data.add(data)
                else:
                    selector.unregister(key.fileobj)
            now = time.monotonic() - (calls.waited if calls is not None else 0.0)
            if killed and now > began + limits.seconds + 10:
                raise OSError("the program's output did not end after it was killed")
            if killed or not alive or now < next_look:
                continue
            next_look = now + _LOOK
            if stop is not None and stop.is_set():
                killed = "stopped"
            elif now - began > limits.seconds:
                killed = "time"
            elif calls is not None and calls.exceeded:
                killed = "calls"
            elif max(one.size for one in kept) > most:
                killed = "output"
            else:
                killed = _excess(process.pid, limits)
            if killed:
                kill(process)
    return killed, kept


def _excess(pid: int, limits: Limits) -> str:
    """Of which of the two that no limit of the kernel bounds the processes use too much."""
    kilobytes, files = 0, 0
    for one in _tree(pid):
        with suppress(OSError):
            status = Path(f"/proc/{one}/status").read_text()
            kilobytes += sum(
                int(found) for found in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", status, re.MULTILINE)
            )
        with suppress(OSError):  # until its root is the sandbox's, it has no such folder
            home = os.statvfs(f"/proc/{one}/root{HOME}")
            files = (
                max(files, home.f_files - home.f_ffree)
                if home.f_blocks * home.f_frsize <= limits.disk_mb * _MB
                else files
            )
    if kilobytes * 1024 > limits.memory_mb * _MB:
        return "memory"
    return "files" if files > limits.files else ""


def _tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    found: set[int] = set()
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found |= {int(one) for one in Path(f"/proc/{pid}/task/{task}/children").read_text().split()}
    for one in found:
        yield from _tree(one)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the sandbox: with its first process, the kernel ends all others in it. That one asks to end with bwrap only
    a moment after it began, so it is killed too; bwrap is held before, or it could begin one that nobody has seen."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for one in list(_tree(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.wait()
