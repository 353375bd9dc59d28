"""The folder of runs (`root`), which is its owner's alone.

Settings of Prefect, logs and locks below it are read, appended to and executed by whoever runs a command there. So
another user must not have prepared it: in a folder such as `/tmp` anybody can create a name first.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from components.errors import ResourceError


def private_root(root: Path) -> None:
    """Create the folder where there is none, readable for its owner alone. Raise ResourceError where another user owns
    it or everybody can write to it, and OSError where it cannot be created."""
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.stat()
    if status.st_uid != os.geteuid():
        raise ResourceError(
            f"root = {root}: belongs to user {status.st_uid}, expected {os.geteuid()}, who runs this command: its "
            "owner could have this command run code or overwrite files. Choose a folder of your own: root=DIR"
        )
    if stat.S_IMODE(status.st_mode) & stat.S_IWOTH:
        raise ResourceError(
            f"root = {root}: every user can write to it (mode {stat.S_IMODE(status.st_mode):o}), and so have this "
            "command run code. Choose another folder: root=DIR, or take the permission away: chmod o-w"
        )
