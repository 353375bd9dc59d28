"""Working folder on this machine, for a program that works on files itself (`agent.command`).

A folder is locked as long as its process lives. Each new one removes those that killed processes have left.
"""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

from components.environments.tasks.folder import WORK

_PREFIX = "espalier-task-"


class HostFolder:
    """Folder with the content of an archive of ours; `path` is the working folder in it."""

    def __init__(self, work: bytes):
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            _remove(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._lock = os.open(unlocked, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._top = unlocked.rename(unlocked.with_name(unlocked.name[1:]))
        with tarfile.open(fileobj=io.BytesIO(work)) as tar:
            tar.extractall(self._top, filter="data")
        self.path = self._top / WORK

    def close(self) -> None:
        """Remove the folder."""
        os.close(self._lock)
        _remove(self._top, fcntl.LOCK_EX)

    def packed(self, limit_mb: int) -> tuple[bytes, str]:
        """Return an archive of the folder, and why there is none. Links are not followed; devices, pipes and sockets
        are left out."""
        packed = io.BytesIO()
        try:
            size = sum(file.lstat().st_size for file in self.path.rglob("*"))
            if size > limit_mb << 20:
                return b"", f"the program left {size >> 20} MB of files; the limit is {limit_mb} MB"
            with tarfile.open(fileobj=packed, mode="w") as tar:
                tar.add(self.path, WORK, filter=_plain)
        except OSError as error:
            return b"", f"the files that the program left cannot be read: {error.strerror}"
        except RecursionError:
            return b"", "the program left too many folders in each other"
        return packed.getvalue(), ""


def _remove(folder: Path, lock: int) -> None:
    """Remove a folder unless its owner holds it locked, or is another user."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, lock)
        # Not shutil.rmtree: a program may leave thousands of folders in each other, or folders that forbid it.
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, str(folder)], stderr=subprocess.DEVNULL)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None
