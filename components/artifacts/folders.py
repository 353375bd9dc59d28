"""Files below a folder, reached without following a symbolic link.

A check of a path and its later use are two look-ups, and a link in the path may lead elsewhere in either. So the folder
is held open, and each segment of a name is opened relative to the one before it (`openat` with `O_NOFOLLOW`). The
folder's own path may hold links up to its last segment: that part the user has named.
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
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # without waiting for the other end of a pipe


class NotPlain(OSError):
    """A symbolic link, pipe or device, where a regular file or a folder was expected."""


class Folder:
    """A folder that is held open. Names are relative paths of plain segments (`components.artifacts.names`).

    Raises FileNotFoundError where there is none, NotPlain where its last segment is a link. follow: also follow that.
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
        """Open a regular file for reading. Raise FileNotFoundError where there is none, NotPlain for anything else."""
        with self._parent(name) as (parent, last):
            with _named(self.path / name):
                descriptor = os.open(last, os.O_RDONLY | _FILE, dir_fd=parent)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise NotPlain(errno.EINVAL, "is no regular file", str(self.path / name))
                yield file

    def write(self, name: str, content: BinaryIO | bytes, *, exclusive: bool = False) -> bool:
        """Write a file whole: aside first, then renamed to its place, so that nobody reads half of it.

        exclusive: where there is one already, leave it and return False.
        """
        with self._parent(name, make=True) as (parent, last), _named(self.path / name):
            aside = f".{uuid.uuid4().hex}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
            try:
                with os.fdopen(os.open(aside, flags, 0o666, dir_fd=parent), "wb") as file:
                    if isinstance(content, bytes):
                        file.write(content)
                    else:
                        shutil.copyfileobj(content, file, 2**20)
                if not exclusive:
                    os.rename(aside, last, src_dir_fd=parent, dst_dir_fd=parent)
                    return True
                os.link(aside, last, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside, dir_fd=parent)
            return True

    def take(self, source: Path, name: str) -> None:
        """Move a file from elsewhere on the same disk to a name at which there is none."""
        with self._parent(name, make=True) as (parent, last), _named(self.path / name):
            os.link(source, last, dst_dir_fd=parent, follow_symlinks=False)
            os.unlink(source)

    def delete(self, name: str) -> None:
        """Delete a file; a link is deleted itself. Raise FileNotFoundError where there is none."""
        with self._parent(name) as (parent, last), _named(self.path / name):
            os.unlink(last, dir_fd=parent)

    def names(self) -> Iterator[str]:
        """Yield the name of everything in the folder that is no folder itself: files, links, pipes."""
        for here, folders, files, descriptor in os.fwalk(".", onerror=_raise, dir_fd=self._descriptor):
            prefix = "" if here == "." else f"{here[2:]}/"
            links = [name for name in folders if stat.S_ISLNK(os.lstat(name, dir_fd=descriptor).st_mode)]
            yield from (f"{prefix}{name}" for name in (*files, *links))

    @contextlib.contextmanager
    def _parent(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder that holds a name; yields its descriptor and the last segment."""
        *segments, last = name.split("/")
        if not last or any(segment in ("", ".", "..") or "\0" in segment for segment in (*segments, last)):
            raise NotPlain(errno.EINVAL, "is no relative path of plain segments", name)
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
    """Give errors of a system call the whole path, and those of links and pipes a class of their own."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotPlain(error.errno, "is a symbolic link, or lies below a link or a file", str(path)) from None
        if error.errno == errno.ENXIO:
            raise NotPlain(error.errno, "is no regular file", str(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
