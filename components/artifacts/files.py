"""The objects of a remote store: a filesystem of fsspec, narrowed to what a store needs.

Every operation on S3 has time-outs. One that fails is tried again, with growing pauses, for a bounded time; forbidden
is not tried again. Then it raises ResourceError, which names the URI and says what to do. Credentials come from the
environment alone (AWS_ACCESS_KEY_ID and so on).

Two operations need a promise of the store: `create` writes only where nothing is, `replace` only over what was seen.
S3 keeps both (`If-None-Match`, `If-Match`); file:// and gs:// keep the first, and the second is a look before
the write. Other filesystems may look before both; then two machines that ask within the same moment do the same work,
which costs time and harms nothing, since what is read is verified.
"""

from __future__ import annotations

import errno
import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from components.artifacts.folders import NotPlain
from components.artifacts.shared_folder import SharedFolder
from components.errors import ResourceError
from components.redaction import mask_text

logger = logging.getLogger(__name__)

Got = TypeVar("Got")

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""What fsspec needs for a protocol."""
PART = 8 * 2**20
"""Bytes of one part of a large upload: small enough for a slow line to send within the time-out."""
READ = 64 * 2**20
"""Most bytes of an object that is read into memory: a manifest, a lock."""
PARTS = 10_000
"""The most that S3 allows."""
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"total_max_attempts": 1}},
        "max_concurrency": 4,
    },
}
HERE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of this machine's disk."""


@dataclass(frozen=True)
class State:
    """An object as it was seen."""

    version: str
    """Changes whenever the object is written."""
    modified: datetime
    """When it was written, by the store's clock."""


class RemoteFiles:
    """Objects below a URI, by name. Opened at first use; safe to use from several threads.

    patience: seconds for which an operation that fails is tried again. Everything raises ResourceError.
    """

    def __init__(self, uri: str, patience: float):
        self.uri = uri
        self.patience = patience
        self._protocol, _, _ = uri.partition("://")
        self._opened: Any = None

    def impatient(self) -> RemoteFiles:
        """The same, without a second try."""
        other = RemoteFiles(self.uri, 0)
        other._opened = self._fs
        return other

    def read(self, name: str) -> bytes | None:
        """The content of an object; None where there is none. Only for what fits in memory: more than `READ` bytes
        are refused."""
        try:
            if (size := self.size(name)) > READ:
                raise ResourceError(
                    f"store: {self.uri}/{name} has {size} bytes, and at most {READ} are expected there. Somebody else "
                    "has written it: find out who did, and delete it"
                )
            return self._try("read", name, lambda path: self._fs.cat_file(path))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Writes an object whole, over what may be there."""
        self._put("write", name, lambda path: self._fs.pipe_file(path, data))

    def create(self, name: str, data: bytes) -> bool:
        """Writes an object whole; False, and nothing is written, where one is."""
        return self._put("write", name, lambda path: self._create(path, data))

    def state(self, name: str) -> State | None:
        """What can be seen of an object without reading it; None where there is none."""
        try:
            return self._try("read", name, self._state)
        except FileNotFoundError:
            return None

    def replace(self, name: str, data: bytes, seen: State) -> bool:
        """Writes an object if it still is as it was seen; False, and nothing is written, where it is not."""
        return self._put("write", name, lambda path: self._replace(path, data, seen))

    def upload(self, name: str, source: Path) -> None:
        """Copies a file there."""
        part = max(PART, -(-source.stat().st_size // PARTS))
        options = {"chunksize": part} if self._protocol == "s3" else {}
        self._put("write", name, lambda path: self._fs.put_file(str(source), path, **options))

    def size(self, name: str) -> int:
        """Return the bytes of an object. Raise FileNotFoundError where there is none."""
        return int(self._try("read", name, lambda path: self._fs.info(path)["size"]))

    def download(self, name: str, target: Path) -> None:
        """Copies an object here. Raises FileNotFoundError where there is none."""
        self._try("read", name, lambda path: self._fs.get_file(path, str(target)))

    def delete(self, name: str) -> None:
        """Removes an object, if there is one."""
        try:
            self._try("delete", name, lambda path: self._fs.rm_file(path))
        except FileNotFoundError:
            return

    @property
    def _fs(self) -> Any:
        if self._opened is None:
            self._opened = _open(self._protocol, self.uri)
        return self._opened

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(path, data, mode="create")
        except OSError as error:
            if isinstance(error, FileExistsError) or _refused(error):
                return False
            raise
        return True

    def _replace(self, path: str, data: bytes, seen: State) -> bool:
        try:
            if self._protocol == "s3":
                self._fs.pipe_file(path, data, IfMatch=seen.version)
            elif self._state(path) == seen:
                self._fs.pipe_file(path, data)
            else:
                return False
        except OSError as error:
            if isinstance(error, FileNotFoundError) or _refused(error):
                return False
            raise
        return True

    def _state(self, path: str) -> State:
        info = self._fs.info(path)
        modified = info.get("LastModified") or self._fs.modified(path)
        return State(str(info.get("ETag") or modified), modified)

    def _put(self, doing: str, name: str, operation: Callable[[str], Got]) -> Got:
        try:
            return self._try(doing, name, operation)
        except FileNotFoundError as error:
            raise ResourceError(
                f"store: there is no place to write to at {self.uri}: {_words(error)}. "
                "Make the bucket or folder, or correct the address: store=URI"
            ) from error

    def _try(self, doing: str, name: str, operation: Callable[[str], Got]) -> Got:
        """The result of the operation on the path of an object. FileNotFoundError passes."""
        deadline = None
        pause = 0.5
        while True:
            try:
                return operation(f"{self.uri}/{name}")
            except (FileNotFoundError, AttributeError, TypeError):
                raise
            except Exception as error:  # every filesystem has errors of its own
                now = time.monotonic()
                deadline = deadline or now + self.patience  # from the first failure on: a large upload takes its time
                if _hopeless(error) or now + pause > deadline:
                    raise ResourceError(f"store: cannot {doing} {self.uri}/{name}: {_advice(error)}") from error
                if pause < 1:
                    logger.warning(
                        "store: cannot %s %s/%s: %s; trying again for %.0f s",
                        *(doing, self.uri, name, _words(error), self.patience),
                    )
            time.sleep(pause)
            pause = min(2 * pause, 15.0)


def _open(protocol: str, uri: str) -> Any:
    if protocol == "file":
        return SharedFolder(uri)
    import fsspec

    package = PACKAGES.get(protocol)
    try:
        if package is not None:
            importlib.import_module(package)
        filesystem = fsspec.filesystem(
            protocol, use_listings_cache=False, skip_instance_cache=True, **OPTIONS.get(protocol, {})
        )
    except ImportError as error:
        wanted = f"{package}=={fsspec.__version__}" if package in ("s3fs", "gcsfs") else package
        how = f"pip install {wanted}" if wanted else str(error)
        raise ResourceError(f"store: {uri} needs a package that is not installed: {how}") from error
    if protocol == "s3":
        filesystem.retries = 2  # of its own; ours come on top
    return filesystem


def _refused(error: OSError) -> bool:
    """Whether S3 says that the condition of a write does not hold."""
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("Error", {}).get("Code") in ("PreconditionFailed", "412")


def _hopeless(error: Exception) -> bool:
    """Whether it would come out the same a minute later."""
    credentials = "Credentials" in type(error).__name__  # botocore's; it may not be installed
    here = isinstance(error, OSError) and error.errno in HERE
    return here or credentials or isinstance(error, NotPlain | PermissionError | ValueError | NotImplementedError)


def _advice(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in HERE:
        return f"{_words(error)}. Make room on this machine's disk, or choose another folder: root=DIR"
    if isinstance(error, NotPlain):
        return (
            f"{_words(error)}. Links in a shared folder are not followed, since others may have made them: find out "
            "who did, and delete it"
        )
    if isinstance(error, PermissionError):
        return (
            f"{_words(error)}. It must be allowed to read, write, list and delete there; the credentials come from the "
            "environment (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE)"
        )
    if "Credentials" in type(error).__name__:
        return f"{_words(error)}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    return (
        f"{_words(error)}. Is the address right (for S3 also AWS_ENDPOINT_URL, AWS_DEFAULT_REGION), and the server up? "
        "store=null keeps everything below root"
    )


def _words(error: Exception) -> str:
    text = " ".join(mask_text(str(error)).split()) or "no reason given"
    return f"{type(error).__name__}: {text}".rstrip(".")
