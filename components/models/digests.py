"""Digests of the files of a model: what a folder of weights holds, and whether it still does.

A folder that Espalier makes has a record beside it, `.NAME.json`, with the sha256 of each file, written when the folder
was filled. Each process verifies a folder against it once, before it reads the model, and again when a file's inode,
size or dates change. What changes on the disk under a process that has verified it, without a change of these, is
noticed by the next process only.

A folder of the user's has no record. Its digest is part of the stage keys instead, so another content has other keys.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from components.artifacts.keys import file_digest, json_digest
from components.errors import ResourceError
from components.json_text import parse_json

ENDINGS = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Of the files that a model is made of."""

_Signature = tuple[int, ...]
_lock = threading.Lock()
_digests: dict[str, tuple[_Signature, str]] = {}
"""sha256 of each file that this process has read, with what the file looked like then."""


def belongs(name: str) -> bool:
    """Return whether a file of this name, at the top of a model's folder, is part of the model."""
    return name.endswith(ENDINGS) and not name.startswith("consolidated")


def folder_digest(folder: Path) -> str:
    """Return a sha256 over names and contents of the files that the model in a folder is made of."""
    return json_digest(_contents(folder))


def write_record(record: Path, folder: Path, revision: str | None) -> str | None:
    """Record what a complete folder holds, all at once.

    revision: commit of the hub from which it was made. Returns how the folder differs from what an earlier record of
    the same model says, None where it does not.
    """
    contents = _contents(folder)
    earlier = read_record(record)
    part = record.with_name(f"{record.name}.{os.getpid()}.part")
    text = json.dumps({"revision": revision, "files": contents}, indent=1, sort_keys=True)
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(record)
    if earlier is None:
        return None
    names = sorted({*contents, *earlier["files"]})
    return ", ".join(name for name in names if contents.get(name) != earlier["files"].get(name)) or None


def read_record(record: Path) -> dict[str, Any] | None:
    """Return a record, `files` and `revision`; None where there is none that can be read."""
    try:
        data = parse_json(record.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get("files"), dict) and data["files"] else None


def damage(record: Path, folder: Path) -> str | None:
    """Return what is wrong with a folder that was made here, None where it is what was recorded."""
    data = read_record(record)
    if data is None:
        return f"there is no record of its digests ({record.name})"
    try:
        present = {path.name for path in folder.iterdir() if path.is_file() and belongs(path.name)}
    except FileNotFoundError:
        return "it is missing"
    if missing := sorted(set(data["files"]) - present):
        return f"{missing[0]} is missing"
    if added := sorted(present - set(data["files"])):
        return f"{added[0]} was not there when it was made"
    changed = [name for name, digest in data["files"].items() if _digest(folder / name) != digest]
    return f"{changed[0]} does not match the digest that was recorded when it was made" if changed else None


def _contents(folder: Path) -> dict[str, str]:
    return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.is_file() and belongs(path.name)}


def _digest(path: Path) -> str:
    """Return the sha256 of a file. It is read once per process, as long as it looks the same."""
    try:
        before = _signature(path)
        with _lock:
            known = _digests.get(str(path.absolute()))
        if known is not None and known[0] == before:
            return known[1]
        found = file_digest(path)
        if _signature(path) == before:
            with _lock:
                _digests[str(path.absolute())] = before, found
    except OSError as error:
        raise ResourceError(f"the model file {path} cannot be read: {error.strerror or error}") from None
    return found


def _signature(path: Path) -> _Signature:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
