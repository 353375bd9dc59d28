"""Control groups around a sandbox, which charge and bound all memory that its processes cause.

That includes memory of processes, files in the home folder, and kernel memory for pipes, sockets and page tables. A
group is created next to our own if permitted: as root on most hosts, in a container with a writable `/sys/fs/cgroup`,
and as an ordinary user in a group that systemd delegated (`systemd-run --user --scope`). Version 2 provides
`memory.max`, `memory.swap.max` and `pids.max`; of version 1, the memory controller is used. If no group can be created,
`components.sandbox.watch` counts memory.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from components.sandbox.limits import Limits

LOG = logging.getLogger(__name__)

_PREFIX = "espalier-sandbox-"
_MB = 1024 * 1024
_HELPERS = 4
"""Processes of bubblewrap itself that count towards `pids.max`."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Hierarchy:
    """Folder in which control groups for sandboxes can be created."""

    folder: Path
    version: int


class ControlGroup:
    """Control group of one sandbox."""

    def __init__(self, hierarchy: Hierarchy, limits: Limits):
        """Raises OSError if the kernel refuses it."""
        self._version = hierarchy.version
        self.folder = hierarchy.folder / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self.folder.mkdir()
        try:
            self._bound(limits)
        except OSError:
            self.close()
            raise

    def add(self, pid: int) -> None:
        """Move a process into the group, before it starts others."""
        self._write("cgroup.procs", str(pid))

    @property
    def exceeded(self) -> bool:
        """True if the kernel killed a process of the group because of its memory limit."""
        events = (self.folder / ("memory.oom_control" if self._version == 1 else "memory.events")).read_text()
        return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in events.splitlines())

    def close(self) -> None:
        """Remove the group after its last process has ended; if that takes too long, `hierarchy` removes it later."""
        deadline = time.monotonic() + 2
        while self.folder.exists():
            try:
                self.folder.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    LOG.warning("cannot remove control group %s: %s", self.folder, error)
                    return
                time.sleep(0.002)

    def _bound(self, limits: Limits) -> None:
        memory = str(limits.memory_mb * _MB)
        if self._version == 1:
            self._write("memory.limit_in_bytes", memory)
            self._write("memory.memsw.limit_in_bytes", memory, optional=True)
        else:
            self._write("memory.max", memory)
            self._write("memory.swap.max", "0", optional=True)
            self._write("pids.max", str(limits.processes + _HELPERS), optional=True)

    def _write(self, name: str, value: str, optional: bool = False) -> None:
        path = self.folder / name
        if not optional or path.exists():
            path.write_text(value)


@functools.cache
def hierarchy() -> Hierarchy | None:
    """Return the folder for control groups; None without one. Removes groups left by killed processes."""
    memberships = [line.split(":", 2) for line in _lines("/proc/self/cgroup")]
    for version, own_path in (
        (1, next((path for _, controllers, path in memberships if "memory" in controllers.split(",")), None)),
        (2, next((path for number, controllers, path in memberships if number == "0" and not controllers), None)),
    ):
        folder = None if own_path is None else _place(version, own_path)
        if folder is not None:
            _sweep(folder)
            candidate = Hierarchy(folder, version)
            if _works(candidate):
                return candidate
    return None


def _works(hierarchy: Hierarchy) -> bool:
    """Return True if a process can be moved to a new group: the kernel may allow groups and still refuse this."""
    process = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
    group = None
    try:
        group = ControlGroup(hierarchy, Limits())
        group.add(process.pid)
        return not group.exceeded
    except OSError as error:
        LOG.info("cannot create control groups for sandboxes below %s: %s", hierarchy.folder, error)
        return False
    finally:
        process.kill()
        process.wait()
        if group is not None:
            group.close()


def _place(version: int, own_path: str) -> Path | None:
    mounted = _mounted(version, own_path)
    if mounted is None:
        return None
    if version == 1:
        return mounted if os.access(mounted, os.W_OK) else None
    # In version 2 a group with controllers for its children has no processes of its own, so the new group is a sibling
    # of our own. Only the root of the hierarchy may have both.
    folder = mounted if own_path == "/" else mounted.parent
    if not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
        return None
    for _ in range(2):
        with suppress(OSError):
            if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                return folder
            (folder / "cgroup.subtree_control").write_text("+memory +pids")
    return None


def _mounted(version: int, own_path: str) -> Path | None:
    """Return the folder of our own group."""
    for line in _lines("/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        root, mountpoint = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind != ("cgroup" if version == 1 else "cgroup2"):
            continue
        if version == 1 and "memory" not in options.split(","):
            continue
        relative = os.path.relpath(own_path, root)
        if not relative.startswith(".."):
            return Path(mountpoint) / relative
    return None


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not os.path.exists(f"/proc/{pid}"):
            with suppress(OSError):
                folder.rmdir()


def _lines(path: str) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text().splitlines()
    return []
