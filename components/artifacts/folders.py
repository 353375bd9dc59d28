"""File access below a folder, without following symbolic links.

Checking a path and using it later are two lookups, and a link in the path may point elsewhere in between. So the folder
is held open, and each segment of a name is opened relative to the previous one (`openat` with `O_NOFOLLOW`). The
folder's own path may contain links up to its last segment, because the user chose it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Self

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # does not block on a pipe


class UnsafePath(OSError):
    """Symbolic link, pipe or device in place of a regular file or folder."""


class Folder:
    """Open folder. Names are relative paths of plain segments (`components.artifacts.names`).

    Raises FileNotFoundError if it does not exist, UnsafePath if its last segment is a link. follow: follow that link.
    """

    def __init__(self, path: Path, *, follow: bool = False):
        self.path = path
        if follow:
            self._descriptor = os.open(path, _FOLDER & ~os.O_NOFOLLOW)
        else:
            with _named(path):
                self._descriptor = os.open(path, _FOLDER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BufferedReader]:
        """Open a regular file for reading. Raise FileNotFoundError if it does not exist, UnsafePath if not regular."""
        with self._parent(name) as (parent, last):
            with _named(self.path / name):
                descriptor = os.open(last, os.O_RDONLY | _FILE, dir_fd=parent)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise UnsafePath(errno.EINVAL, "is not a regular file", str(self.path / name))
                yield file

    def write(self, name: str, content: BinaryIO | bytes, *, exclusive: bool = False) -> bool:
        """Write a file atomically: to a temporary name first, then renamed, so that no reader sees part of it.

        exclusive: if the file exists, leave it and return False.
        """
        with self._parent(name, make=True) as (parent, last), _named(self.path / name):
            temporary = f".{uuid.uuid4().hex}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
            try:
                with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=parent), "wb") as file:
                    if isinstance(content, bytes):
                        file.write(content)
                    else:
                        shutil.copyfileobj(content, file, 2**20)
                if not exclusive:
                    os.rename(temporary, last, src_dir_fd=parent, dst_dir_fd=parent)
                    return True
                os.link(temporary, last, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)
            return True

    def take(self, source: Path, name: str) -> None:
        """Move a file from elsewhere on the same disk to a new name."""
        with self._parent(name, make=True) as (parent, last), _named(self.path / name):
            os.link(source, last, dst_dir_fd=parent, follow_symlinks=False)
            os.unlink(source)

    def delete(self, name: str) -> None:
        """Delete a file; a link itself is deleted. Raise FileNotFoundError if it does not exist."""
        with self._parent(name) as (parent, last), _named(self.path / name):
            os.unlink(last, dir_fd=parent)

    def names(self) -> Iterator[str]:
        """Yield the name of everything in the folder except folders: files, links, pipes."""
        for here, folders, files, descriptor in os.fwalk(".", onerror=_raise, dir_fd=self._descriptor):
            prefix = "" if here == "." else f"{here[2:]}/"
            links = [name for name in folders if stat.S_ISLNK(os.lstat(name, dir_fd=descriptor).st_mode)]
            yield from (f"{prefix}{name}" for name in (*files, *links))

    @contextlib.contextmanager
    def _parent(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the descriptor of the folder that contains a name, and the name's last segment."""
        *segments, last = name.split("/")
        if not last or any(segment in ("", ".", "..") or "\0" in segment for segment in (*segments, last)):
            raise UnsafePath(errno.EINVAL, "is not a relative path of plain segments", name)
        descriptor = os.dup(self._descriptor)
        try:
            for segment in segments:
                with _named(self.path / name):
                    if make:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(segment, dir_fd=descriptor)
                    below = os.open(segment, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor, last
        finally:
            os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the full path to errors of system calls, and raise UnsafePath for links and pipes."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafePath(error.errno, "is a symbolic link, or is below a link or a file", str(path)) from None
        if error.errno == errno.ENXIO:
            raise UnsafePath(error.errno, "is not a regular file", str(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
