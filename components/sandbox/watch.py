"""Reads what a program prints, looks at what it uses, and ends it.

Memory is bounded by a control group where there is one (`components.sandbox.cgroups`). Elsewhere it is counted here,
as a sum of upper bounds for everything that the system calls of `seccomp.py` can still make the kernel hold. The sum
is at most `_RATE` times the time between two looks too late: a program that is counted runs on one processor.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from components.sandbox.calls import Calls
from components.sandbox.cgroups import Group
from components.sandbox.limits import Limits

HOME = "/home/agent"
"""Where a program starts, and the only place where it can write; `/tmp` is a folder in it."""

_MB = 1024 * 1024
_LOOK = 0.02
"""Seconds between two looks at what a program uses; fewer when it comes close to its limit."""
_LEAST_LOOK = 0.004
_RATE = 16 * 1024 * _MB
"""Bytes that one processor fills in a second."""
OPEN_FILES = 128
"""That a process may have. In flight between unix sockets are at most these and another 253, uncounted."""
# Bytes that are counted for what the kernel does not say the size of. Each is the most that one can hold.
_PER_THREAD = 64 * 1024  # its stack in the kernel, and what describes it and its process
_PER_OPEN_FILE = 64 * 1024  # a pipe of the default size
_PER_FILE = 2048
_PER_LOCK = 256
_PAGES_PER_PAGE_OF_MAPPINGS = 16  # each page may be a mapping, which takes 256 bytes
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
    group: Group | None = None,
) -> tuple[str, list[Kept]]:
    """Read what the program prints until it ends, or a reason to kill it. Time in which it waits for the answer to a
    call does not count."""
    assert process.stdout is not None
    assert process.stderr is not None
    kept = [Kept(limits.output_bytes), Kept(limits.output_bytes)]
    most, next_look, killed = _FLOOD * limits.output_bytes, began, ""
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        usage = Usage(process.pid, limits, group)
        stack.callback(usage.close)
        ended = os.pidfd_open(process.pid)
        stack.callback(os.close, ended)
        selector.register(ended, selectors.EVENT_READ)
        for pipe, sink in zip((process.stdout, process.stderr), kept, strict=True):
            stack.enter_context(pipe)
            selector.register(pipe, selectors.EVENT_READ, sink)
        alive, pause = True, 0.0
        while alive or len(selector.get_map()) > 0:
            for key, _ in selector.select(pause):
                if key.data is None:
                    selector.unregister(ended)
                    alive = False
                    kill(process)
                elif data := os.read(key.fd, 65536):
                    key.data.add(data)
                else:
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            pause = _LOOK if killed or not alive else max(0.0, next_look - now)
            now -= calls.waited if calls is not None else 0.0
            if killed and now > began + limits.seconds + 10:
                raise OSError("the program's output did not end after it was killed")
            if killed or not alive or pause > 0:
                continue
            if stop is not None and stop.is_set():
                killed = "stopped"
            elif now - began > limits.seconds:
                killed = "time"
            elif calls is not None and calls.exceeded:
                killed = "calls"
            elif max(one.size for one in kept) > most:
                killed = "output"
            else:
                killed = usage.excess()
            if killed:
                kill(process)
            pause = usage.pause
            next_look = time.monotonic() + pause
    if not killed and group is not None and group.exceeded:
        killed = "memory"
    return killed, kept


class Usage:
    """Memory and files that a sandbox holds, looked at from outside."""

    def __init__(self, pid: int, limits: Limits, group: Group | None):
        """pid: of bwrap."""
        self._pid = pid
        self._limits = limits
        self._group = group
        self._home: int | None = None
        self._proc: int | None = None
        """Folders of the sandbox, open once it has them."""
        self._socket = 2 * int(Path("/proc/sys/net/core/wmem_default").read_text())
        """Bytes that a socket holds at most: a full buffer, and a message that it took with room left."""
        self.pause = _LOOK
        """Seconds until the next look."""

    def close(self) -> None:
        for folder in (self._home, self._proc):
            if folder is not None:
                os.close(folder)

    def excess(self) -> str:
        """Return what the sandbox uses too much of: memory, files, or nothing."""
        if self._proc is None:
            self._open()
        files, blocks = 0, 0
        if self._home is not None:
            home = os.fstatvfs(self._home)
            files, blocks = home.f_files - home.f_ffree, (home.f_blocks - home.f_bfree) * home.f_frsize
        if self._group is not None:
            exceeded = self._group.exceeded
        else:
            left = self._limits.memory_mb * _MB - self._memory() - blocks - files * _PER_FILE
            exceeded = left < 0
            self.pause = min(_LOOK, max(left / _RATE, _LEAST_LOOK))
        if exceeded:
            return "memory"
        return "files" if files > self._limits.files else ""

    def _open(self) -> None:
        """Open the sandbox's folders, if its first process has them for its root already."""
        for first in _children(self._pid):
            root = f"/proc/{first}/root"
            try:
                home = os.open(root + HOME, os.O_RDONLY | os.O_DIRECTORY)
                found = os.fstatvfs(home)
                if found.f_blocks * found.f_frsize > self._limits.disk_mb * _MB:  # a folder of the host
                    os.close(home)
                    continue
                self._home = home
                self._proc = os.open(f"{root}/proc", os.O_RDONLY | os.O_DIRECTORY)
            except PermissionError as error:  # not to run a program that nobody watches
                raise OSError(f"the sandbox cannot be looked into, to count what its program uses: {error}") from error
            except OSError:
                continue  # not set up yet, or ended

    def _memory(self) -> int:
        """Return the most bytes that the processes, and the kernel for them, can hold at present."""
        if self._proc is None:
            return 0  # only bwrap itself runs
        total = 0
        for name in os.listdir(self._proc):
            if name.isdigit():
                with suppress(OSError):
                    total += self._process(name)
                if total > self._limits.memory_mb * _MB:
                    return total  # enough to know, and the rest may be much to read
        with suppress(OSError):
            sockets = re.search(r"^sockets: used (\d+)", self._read("1/net/sockstat"), re.MULTILINE)
            total += self._socket * int(sockets[1]) if sockets else 0
        return total

    def _process(self, name: str) -> int:
        # The first thread may have ended before the others, and then has no memory to show.
        for thread in self._list(f"{name}/task"):
            status = dict(_FIELDS.findall(self._read(f"{name}/task/{thread}/status")))
            if "VmSize" in status:
                break
        else:
            return _PER_THREAD  # a process that has ended, and whose parent has not noticed
        kilobytes = sum(int(status.get(field, 0)) for field in _HELD)
        kilobytes += int(status["VmSize"]) // _PAGES_PER_PAGE_OF_MAPPINGS
        held = kilobytes * 1024 + int(status["Threads"]) * _PER_THREAD
        try:
            descriptors = self._list(f"{name}/fd")
        except OSError:
            return held + int(status["FDSize"]) * _PER_OPEN_FILE
        for descriptor in descriptors:
            with suppress(OSError):
                held += _PER_LOCK * self._read(f"{name}/fdinfo/{descriptor}").count("\nlock:")
        return held + len(descriptors) * _PER_OPEN_FILE

    def _list(self, path: str) -> list[str]:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def _read(self, path: str) -> str:
        with open(os.open(path, os.O_RDONLY, dir_fd=self._proc), encoding="utf-8", errors="replace") as file:
            return file.read()


_HELD = ("RssAnon", "RssShmem", "VmSwap", "VmPTE", "HugetlbPages")
_FIELDS = re.compile(rf"^({'|'.join(_HELD)}|VmSize|FDSize|Threads):\s+(\d+)", re.MULTILINE)


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def kill(process: subprocess.Popen[bytes]) -> None:
    """End the sandbox: with its first process, the kernel ends all others in it. That one asks to end with bwrap only
    a moment after it began, so it is killed too; bwrap is held before, or it could begin one that nobody has seen."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for pid in [*_children(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
