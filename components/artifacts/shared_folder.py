"""Folder mounted by several machines, used as a store: the part of fsspec's interface that `files` needs.

Others may write there, so links below the folder are never followed: a planted link would redirect our writes. Objects
are written to a temporary name and renamed, so that no reader sees part of one.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.artifacts.folders import Folder


class SharedFolder:
    """Objects below `file://PATH`, addressed by their full URI. The folder itself may be reached through links."""

    def __init__(self, uri: str):
        self._uri = uri
        self._path = Path(uri.removeprefix("file://"))

    def cat_file(self, path: str) -> bytes:
        """Return the content of an object. Raise FileNotFoundError if it does not exist."""
        with Folder(self._path, follow=True) as folder, folder.open(self._name(path)) as file:
            return file.read()

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        """Write an object atomically. With mode `create`, raise FileExistsError if it exists."""
        with self._writable() as folder:
            if not folder.write(self._name(path), data, exclusive=mode == "create"):
                raise FileExistsError(path)

    def put_file(self, source: str, path: str) -> None:
        """Copy a local file to an object."""
        with self._writable() as folder, open(source, "rb") as file:
            folder.write(self._name(path), file)

    def get_file(self, path: str, target: str) -> None:
        """Copy an object to a new local file."""
        with (
            Folder(self._path, follow=True) as folder,
            folder.open(self._name(path)) as file,
            Folder(Path(target).parent) as here,
        ):
            here.write(Path(target).name, file)

    def rm_file(self, path: str) -> None:
        """Delete an object. Raise FileNotFoundError if it does not exist."""
        with Folder(self._path, follow=True) as folder:
            folder.delete(self._name(path))

    def info(self, path: str) -> dict[str, Any]:
        """Return version, size and date of an object. Raise FileNotFoundError if it does not exist."""
        with Folder(self._path, follow=True) as folder, folder.open(self._name(path)) as file:
            status = os.fstat(file.fileno())
        modified = datetime.fromtimestamp(status.st_mtime, UTC)
        return {"ETag": f"{status.st_ino} {status.st_mtime_ns}", "size": status.st_size, "LastModified": modified}

    def _writable(self) -> Folder:
        self._path.mkdir(parents=True, exist_ok=True)
        return Folder(self._path, follow=True)

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self._uri}/")
