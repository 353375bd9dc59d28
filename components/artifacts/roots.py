"""Access checks of the run root (`root`), which must be private to its owner.

Prefect's settings, logs and locks below it are read, appended to and executed by the commands that run there. Another
user must not be able to prepare it: in a folder such as `/tmp` anyone can create a name first.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from components.errors import ResourceError


def private_root(root: Path) -> None:
    """Create the folder if needed, accessible to its owner only. Raise ResourceError if another user owns it or every
    user can write to it, and OSError if it cannot be created."""
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    check_root(root)


def check_root(root: Path) -> None:
    """Raise ResourceError if the folder exists and another user owns it or every user can write to it."""
    try:
        status = root.stat()
    except OSError:
        return  # its first writer reports it
    if status.st_uid != os.geteuid():
        raise ResourceError(
            f"root = {root}: belongs to user {status.st_uid}, expected {os.geteuid()}, who runs this command. Its "
            "owner could make this command run code or overwrite files. Choose a folder of your own: root=DIR"
        )
    if stat.S_IMODE(status.st_mode) & stat.S_IWOTH:
        raise ResourceError(
            f"root = {root}: every user can write to it (mode {stat.S_IMODE(status.st_mode):o}), and so could make "
            "this command run code. Choose another folder: root=DIR, or remove the permission: chmod o-w"
        )
