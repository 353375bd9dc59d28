"""Working folder on this machine, for a program that works on files itself (`agent.command`)."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

from components.environments.tasks.folder import WORK


class HostFolder:
    """Folder with the content of an archive of ours; `path` is the working folder in it."""

    def __init__(self, work: bytes):
        self._top = tempfile.TemporaryDirectory(prefix="espalier-task-", ignore_cleanup_errors=True)
        with tarfile.open(fileobj=io.BytesIO(work)) as tar:
            tar.extractall(self._top.name, filter="data")
        self.path = Path(self._top.name, WORK)
        self.close = self._top.cleanup

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
        return packed.getvalue(), ""


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None
