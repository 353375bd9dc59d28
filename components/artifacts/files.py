"""Objects of a remote store: an fsspec filesystem, narrowed to the operations of an artifact store.

Every operation on S3 has timeouts. A failed operation is retried with exponential backoff for a bounded time; denied
permission is not retried. Then it raises ResourceError, which names the URI and says what to do. Credentials come from
the environment alone (AWS_ACCESS_KEY_ID and so on).

Two operations need a guarantee of the store: `create` writes only if the object does not exist, `replace` only if it is
unchanged. S3 guarantees both (`If-None-Match`, `If-Match`); file:// and gs:// guarantee the first, and `replace` checks
before the write. Other filesystems may check before both; then two machines that ask at the same moment do the same
work, which costs time and nothing else, since everything read is verified.

A folder mounted by several machines is a store as well (`SharedFolder`). Others may write there, so links below it are
never followed: a planted link would redirect our writes. Objects are written to a temporary name and renamed, so that
no reader sees part of one.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from components.artifacts.folders import Folder, UnsafePath
from components.errors import ResourceError
from components.redaction import mask_text
from components.retry import Backoff

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs"}
"""Package that fsspec needs for a protocol."""
PART_BYTES = 8 * 2**20
"""Bytes per part of a multipart upload: small enough for a slow connection to send within the timeout."""
READ_LIMIT = 64 * 2**20
"""Maximum bytes of an object that is read into memory: a manifest, a lock."""
MAX_PARTS = 10_000
"""Maximum number of parts of an upload to S3."""
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"total_max_attempts": 1}},
        "max_concurrency": 4,
    },
}
LOCAL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of the local disk."""


@dataclass(frozen=True)
class State:
    """Version and date of an object."""

    version: str
    """Identifier that changes on every write."""
    modified: datetime
    """Time of the last write, by the store's clock."""


class RemoteFiles:
    """Objects below a URI, by name. Opened at first use; safe to use from several threads.

    patience: seconds for which a failing operation is retried. Every method raises ResourceError.
    """

    def __init__(self, uri: str, patience: float):
        self.uri = uri
        self.patience = patience
        self._protocol, _, _ = uri.partition("://")
        self._opened: Any = None

    def without_retry(self) -> RemoteFiles:
        """Return the same files without retries."""
        other = RemoteFiles(self.uri, 0)
        other._opened = self._fs
        return other

    def read(self, name: str) -> bytes | None:
        """Return the content of an object; None if it does not exist. Raise ResourceError for more than `READ` bytes,
        which might not fit in memory."""
        try:
            if (size := self.size(name)) > READ_LIMIT:
                raise ResourceError(
                    f"store: {self.uri}/{name} has {size} bytes, expected at most {READ_LIMIT}. Another program must "
                    "have written it: find out which, and delete the object"
                )
            return self._try("read", name, lambda path: self._fs.cat_file(path))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write an object atomically, replacing any existing one."""
        self._put("write", name, lambda path: self._fs.pipe_file(path, data))

    def create(self, name: str, data: bytes) -> bool:
        """Write an object atomically and return True; return False if it exists already."""
        return self._put("write", name, lambda path: self._create(path, data))

    def state(self, name: str) -> State | None:
        """Return version and date of an object; None if it does not exist."""
        try:
            return self._try("read", name, self._state)
        except FileNotFoundError:
            return None

    def replace(self, name: str, data: bytes, expected: State) -> bool:
        """Write an object if its state is still `expected` and return True; otherwise return False."""
        return self._put("write", name, lambda path: self._replace(path, data, expected))

    def upload(self, name: str, source: Path) -> None:
        """Copy a local file to an object."""
        part = max(PART_BYTES, -(-source.stat().st_size // MAX_PARTS))
        options = {"chunksize": part} if self._protocol == "s3" else {}
        self._put("write", name, lambda path: self._fs.put_file(str(source), path, **options))

    def size(self, name: str) -> int:
        """Return the size of an object in bytes. Raise FileNotFoundError if it does not exist."""
        return int(self._try("read", name, lambda path: self._fs.info(path)["size"]))

    def download(self, name: str, target: Path) -> None:
        """Copy an object to a local file. Raise FileNotFoundError if it does not exist."""
        self._try("read", name, lambda path: self._fs.get_file(path, str(target)))

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
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
            if isinstance(error, FileExistsError) or _precondition_failed(error):
                return False
            raise
        return True

    def _replace(self, path: str, data: bytes, expected: State) -> bool:
        try:
            if self._protocol == "s3":
                self._fs.pipe_file(path, data, IfMatch=expected.version)
            elif self._state(path) == expected:
                self._fs.pipe_file(path, data)
            else:
                return False
        except OSError as error:
            if isinstance(error, FileNotFoundError) or _precondition_failed(error):
                return False
            raise
        return True

    def _state(self, path: str) -> State:
        info = self._fs.info(path)
        modified = info.get("LastModified") or self._fs.modified(path)
        return State(str(info.get("ETag") or modified), modified)

    def _put(self, verb: str, name: str, operation: Callable[[str], Result]) -> Result:
        try:
            return self._try(verb, name, operation)
        except FileNotFoundError as error:
            raise ResourceError(
                f"store: cannot write to {self.uri}: {_summary(error)}. "
                "Create the bucket or folder, or correct the address: store=URI"
            ) from error

    def _try(self, verb: str, name: str, operation: Callable[[str], Result]) -> Result:
        """Return the result of the operation on the path of an object, with retries. FileNotFoundError is not
        retried."""
        backoff = Backoff(self.patience)
        while True:
            try:
                return operation(f"{self.uri}/{name}")
            except (FileNotFoundError, AttributeError, TypeError):
                raise
            except Exception as error:  # each filesystem has its own exception types
                pause = None if _permanent(error) else backoff.pause()
                if pause is None:
                    raise ResourceError(f"store: cannot {verb} {self.uri}/{name}: {_advice(error)}") from error
                if backoff.failures == 1:
                    logger.warning(
                        "store: cannot %s %s/%s: %s; retrying for %.0f s",
                        *(verb, self.uri, name, _summary(error), self.patience),
                    )
            time.sleep(pause)


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
        requirement = f"{package}=={fsspec.__version__}" if package in ("s3fs", "gcsfs") else package
        remedy = f"pip install {requirement}" if requirement else str(error)
        raise ResourceError(f"store: {uri} needs a package that is not installed: {remedy}") from error
    if protocol == "s3":
        filesystem.retries = 2  # of s3fs itself, in addition to ours
    return filesystem


def _precondition_failed(error: OSError) -> bool:
    """Return True if S3 reports that the precondition of a write does not hold."""
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("Error", {}).get("Code") in ("PreconditionFailed", "412")


def _permanent(error: Exception) -> bool:
    """Return True if a retry would fail in the same way."""
    credentials = "Credentials" in type(error).__name__  # by name, because botocore may not be installed
    local = isinstance(error, OSError) and error.errno in LOCAL_ERRNOS
    return local or credentials or isinstance(error, UnsafePath | PermissionError | ValueError | NotImplementedError)


def _advice(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in LOCAL_ERRNOS:
        return f"{_summary(error)}. Free space on this machine's disk, or choose another folder: root=DIR"
    if isinstance(error, UnsafePath):
        return (
            f"{_summary(error)}. Links in a shared folder are not followed, since other users may have made them: find "
            "out who did, and delete the link"
        )
    if isinstance(error, PermissionError):
        return (
            f"{_summary(error)}. Grant permission to read, write, list and delete there; the credentials come from the "
            "environment (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE)"
        )
    if "Credentials" in type(error).__name__:
        return f"{_summary(error)}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    return (
        f"{_summary(error)}. Check the address (for S3 also AWS_ENDPOINT_URL, AWS_DEFAULT_REGION) and the server; "
        "store=null stores everything below root"
    )


def _summary(error: Exception) -> str:
    text = " ".join(mask_text(str(error)).split()) or "no reason given"
    return f"{type(error).__name__}: {text}".rstrip(".")


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


PROTOCOL_ALIASES = {"s3a": "s3", "gcs": "gs", "local": "file"}
"""Protocol aliases and their canonical names."""


def store_uri(text: str) -> str:
    """Return the URI in canonical form, without a trailing slash.

    Raises ValueError, whose message says what was expected, for anything but PROTOCOL://PLACE with a protocol that
    fsspec supports. Credentials (user and password, or a query) are rejected.
    """
    import fsspec

    match = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([^\s/?#]*)(/[^\s?#]*)?", text)
    if match is None:
        raise ValueError("a URI such as s3://BUCKET/PREFIX, without a query")
    protocol, place, path = match.groups()
    protocol = PROTOCOL_ALIASES.get(protocol, protocol)
    if "@" in place:
        raise ValueError("a URI without user and password: credentials come from the environment")
    if protocol not in fsspec.available_protocols():
        raise ValueError(f"a URI such as s3://BUCKET/PREFIX; fsspec does not support the protocol {protocol}")
    if protocol == "file" and (place or not path):
        raise ValueError("an absolute path after file://, as in file:///srv/artifacts")
    if not place and not path:
        raise ValueError("a URI such as s3://BUCKET/PREFIX")
    return f"{protocol}://{place}{path or ''}".rstrip("/")
