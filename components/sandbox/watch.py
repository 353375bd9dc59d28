"""Supervision of a sandboxed program: captures its output, measures its usage, and kills it.

A control group bounds memory if one can be created (`components.sandbox.cgroups`). Otherwise it is counted here, as a
sum of upper bounds for everything that the system calls allowed by `seccomp.py` can make the kernel hold. The excess
before detection is at most `_RATE` times the interval between two checks: a counted program runs on one processor.
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

from components.sandbox.calls import CallServer
from components.sandbox.cgroups import ControlGroup
from components.sandbox.limits import Limits

HOME = "/home/agent"
"""Working directory of a program, and the only writable folder; `/tmp` is a folder in it."""

_MB = 1024 * 1024
_LOOK = 0.02
"""Seconds between two checks of usage; less if the program is close to its limit."""
_LEAST_LOOK = 0.004
_RATE = 16 * 1024 * _MB
"""Bytes per second that one processor can fill."""
OPEN_FILES = 128
"""Open files per process. In flight between unix sockets are at most these and another 253, uncounted."""
# Upper bounds in bytes for kernel objects whose size the kernel does not report.
_PER_THREAD = 64 * 1024  # kernel stack, and the descriptors of thread and process
_PER_OPEN_FILE = 64 * 1024  # pipe of the default size
_PER_FILE = 2048
_PER_LOCK = 256
_PAGES_PER_PAGE_OF_MAPPINGS = 16  # each page may be a mapping, which takes 256 bytes
_OWNER = "ESPALIER_"
_FLOOD = 64
"""Factor on `output_bytes` that a program may print before it is killed."""


class OutputBuffer:
    """Beginning and end of a program's output."""

    def __init__(self, limit: int):
        self.half = limit // 2
        self.first, self.last, self.size = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        free = self.half - len(self.first)
        self.first += data[:free]
        self.last += data[free:] if free else data
        del self.last[: -self.half]

    @property
    def cut(self) -> int:
        """Bytes that were dropped from the middle."""
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
    calls: CallServer | None = None,
    group: ControlGroup | None = None,
) -> tuple[str, list[OutputBuffer]]:
    """Capture the program's output until it ends, or is killed for the reason returned. Time spent waiting for answers
    to calls does not count."""
    assert process.stdout is not None
    assert process.stderr is not None
    buffers = [OutputBuffer(limits.output_bytes), OutputBuffer(limits.output_bytes)]
    output_limit, next_look, killed = _FLOOD * limits.output_bytes, began, ""
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        usage = Usage(process.pid, limits, group)
        stack.callback(usage.close)
        ended = os.pidfd_open(process.pid)
        stack.callback(os.close, ended)
        selector.register(ended, selectors.EVENT_READ)
        for pipe, buffer in zip((process.stdout, process.stderr), buffers, strict=True):
            stack.enter_context(pipe)
            selector.register(pipe, selectors.EVENT_READ, buffer)
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
                raise OSError("the output of the sandboxed program did not end within 10 s of killing it")
            if killed or not alive or pause > 0:
                continue
            if stop is not None and stop.is_set():
                killed = "stopped"
            elif now - began > limits.seconds:
                killed = "time"
            elif calls is not None and calls.exceeded:
                killed = "calls"
            elif max(buffer.size for buffer in buffers) > output_limit:
                killed = "output"
            else:
                killed = usage.excess()
            if killed:
                kill(process)
            pause = usage.pause
            next_look = time.monotonic() + pause
    if not killed and group is not None and group.exceeded:
        killed = "memory"
    return killed, buffers


class Usage:
    """Memory and files of a sandbox, measured from outside."""

    def __init__(self, pid: int, limits: Limits, group: ControlGroup | None):
        """pid: process id of bwrap."""
        self._pid = pid
        self._limits = limits
        self._group = group
        self._home: int | None = None
        self._proc: int | None = None
        """Folders of the sandbox, opened once it has set them up."""
        self._socket = 2 * int(Path("/proc/sys/net/core/wmem_default").read_text())
        """Maximum bytes held by a socket: a full buffer, and one message accepted while there was room."""
        self.pause = _LOOK
        """Seconds until the next check."""

    def close(self) -> None:
        for folder in (self._home, self._proc):
            if folder is not None:
                os.close(folder)

    def excess(self) -> str:
        """Return the exceeded resource, memory or files; empty if none."""
        if self._proc is None:
            self._open()
        files, blocks = 0, 0
        if self._home is not None:
            home = os.fstatvfs(self._home)
            files, blocks = home.f_files - home.f_ffree, (home.f_blocks - home.f_bfree) * home.f_frsize
        if self._group is not None:
            exceeded = self._group.exceeded
        else:
            remaining = self._limits.memory_mb * _MB - self._memory() - blocks - files * _PER_FILE
            exceeded = remaining < 0
            self.pause = min(_LOOK, max(remaining / _RATE, _LEAST_LOOK))
        if exceeded:
            return "memory"
        return "files" if files > self._limits.files else ""

    def _open(self) -> None:
        """Open the sandbox's folders, if its first process has already changed its root to them."""
        for first in _children(self._pid):
            root = f"/proc/{first}/root"
            try:
                home = os.open(root + HOME, os.O_RDONLY | os.O_DIRECTORY)
                status = os.fstatvfs(home)
                if status.f_blocks * status.f_frsize > self._limits.disk_mb * _MB:  # a folder of the host
                    os.close(home)
                    continue
                self._home = home
                self._proc = os.open(f"{root}/proc", os.O_RDONLY | os.O_DIRECTORY)
            except PermissionError as error:  # an unmeasured program must not run
                raise OSError(f"cannot measure the usage of the sandboxed program: {error}") from error
            except OSError:
                continue  # not set up yet, or ended

    def _memory(self) -> int:
        """Return an upper bound of the bytes that the processes, and the kernel for them, currently hold."""
        if self._proc is None:
            return 0  # only bwrap itself runs
        total = 0
        for name in os.listdir(self._proc):
            if name.isdigit():
                with suppress(OSError):
                    total += self._process(name)
                if total > self._limits.memory_mb * _MB:
                    return total  # already exceeded; the rest may be slow to read
        with suppress(OSError):
            sockets = re.search(r"^sockets: used (\d+)", self._read("1/net/sockstat"), re.MULTILINE)
            total += self._socket * int(sockets[1]) if sockets else 0
        return total

    def _process(self, name: str) -> int:
        # The first thread may have ended before the others, and then reports no memory.
        for thread in self._list(f"{name}/task"):
            status = dict(_FIELDS.findall(self._read(f"{name}/task/{thread}/status")))
            if "VmSize" in status:
                break
        else:
            return _PER_THREAD  # a zombie
        kilobytes = sum(int(status.get(field, 0)) for field in _MEMORY_FIELDS)
        kilobytes += int(status["VmSize"]) // _PAGES_PER_PAGE_OF_MAPPINGS
        size = kilobytes * 1024 + int(status["Threads"]) * _PER_THREAD
        try:
            descriptors = self._list(f"{name}/fd")
        except OSError:
            return size + int(status["FDSize"]) * _PER_OPEN_FILE
        for descriptor in descriptors:
            with suppress(OSError):
                size += _PER_LOCK * self._read(f"{name}/fdinfo/{descriptor}").count("\nlock:")
        return size + len(descriptors) * _PER_OPEN_FILE

    def _list(self, path: str) -> list[str]:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def _read(self, path: str) -> str:
        with open(os.open(path, os.O_RDONLY, dir_fd=self._proc), encoding="utf-8", errors="replace") as file:
            return file.read()


_MEMORY_FIELDS = ("RssAnon", "RssShmem", "VmSwap", "VmPTE", "HugetlbPages")
_FIELDS = re.compile(rf"^({'|'.join(_MEMORY_FIELDS)}|VmSize|FDSize|Threads):\s+(\d+)", re.MULTILINE)


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the sandbox. When its first process ends, the kernel ends all others in it. That process asks to end with
    bwrap only after it has started, so it is killed explicitly; bwrap is stopped first, so it cannot start another."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for pid in [*_children(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def owner_options() -> list[str]:
    """Return the first options of bwrap, which name this process and change nothing: they unset no variable."""
    return ["--unsetenv", f"{_OWNER}{os.getpid()}"]


def kill_orphans() -> None:
    """Kill the sandboxes of processes that were killed. bwrap and the first process in it ask to end with their parents
    some milliseconds after they start, and miss the end of one that ended before."""
    for _ in range(100):  # the end of one may show another
        orphans = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and _is_orphan(int(entry))]
        killed = 0
        for pid in orphans:
            with suppress(ProcessLookupError, PermissionError):  # has ended, or belongs to another user
                os.kill(pid, signal.SIGKILL)
                killed += 1
        if not killed:
            return
        time.sleep(0.01)


def _is_orphan(pid: int) -> bool:
    """Return True for a process of a sandbox, started in our namespace, whose parent is neither its owner nor bwrap of
    the same owner."""
    owner = _owner(pid)
    if not owner:
        return False
    with suppress(OSError):
        (parent, *ids), (_, *own_ids) = _status(pid), _status(os.getpid())
        here = len(ids) == len(own_ids) or (len(ids) == len(own_ids) + 1 and ids[-1] == 1)
        return here and owner not in (parent, _owner(parent))
    return False


def _status(pid: int) -> list[int]:
    """Return the id of the parent of a process, and its own ids from the outer to the inner namespace."""
    fields = re.findall(r"^(?:PPid|NSpid):\s+(.+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return [int(number) for number in " ".join(fields).split()]


def _owner(pid: int) -> int:
    """Return the id of the process that started a sandbox, given a process of bwrap in it; 0 for other processes."""
    with suppress(OSError):
        match = re.match(
            rf"[^\0]*bwrap\0--unsetenv\0{_OWNER}(\d+)\0", Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        )
        return int(match[1]) if match else 0
    return 0
