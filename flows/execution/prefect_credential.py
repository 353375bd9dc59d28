"""Credential of the Prefect servers of one run root.

A server started by this project accepts only requests with this credential (Prefect's basic authentication). It is a
random text in a file below the root, readable by its owner only. Other processes receive it through the environment,
never through arguments.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from pathlib import Path

from components.artifacts import lock_file
from components.errors import ResourceError

FILE = "credential"
LOCK_LIMIT = 30.0
"""Seconds to wait for another process that creates the credential."""
VARIABLES = ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_KEY")
"""Environment variables with a credential of a Prefect server."""
_FORM = re.compile(r"espalier:[A-Za-z0-9_-]{43}\n?")
_ANOTHER = "Delete it; the next command creates a new one"


def credential(folder: Path) -> str:
    """Return the credential of the servers with data in `folder`; create it if it does not exist.

    Raises ResourceError if other users can read the file, or if it is not a regular file of this user."""
    path = folder / FILE
    if not os.path.lexists(path):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f".{FILE}.lock", "a+") as lock:
            lock_file(lock, "the credential of the Prefect server", LOCK_LIMIT)
            if not os.path.lexists(path):
                _create(path)
    return _read(path)


def _create(path: Path) -> None:
    """Write a new credential atomically, with mode 600 from the start."""
    draft = path.with_name(f".{FILE}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"espalier:{secrets.token_urlsafe(32)}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _read(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ResourceError(f"{path} is a symbolic link; expected a file. {_ANOTHER}") from None
        raise ResourceError(f"{path}: cannot be read ({error.strerror}). {_ANOTHER}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ResourceError(f"{path} is not a regular file. {_ANOTHER}")
        if status.st_uid != os.geteuid():
            raise ResourceError(
                f"{path} belongs to user {status.st_uid}; expected {os.geteuid()}. Each user needs a separate root: "
                "root=DIR"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            mode = oct(stat.S_IMODE(status.st_mode))[2:]
            raise ResourceError(f"{path} has mode {mode}: other users can read or change it; expected 600. {_ANOTHER}")
        text = file.read(1000).decode("ascii", errors="replace")
    if not _FORM.fullmatch(text):
        raise ResourceError(f"{path} contains no credential of this project. {_ANOTHER}")
    return text.strip()
