"""Digests of model files, and integrity verification of model folders.

A folder that Espalier creates has a record beside it, `.NAME.json`, with the SHA-256 of each file. Each process
verifies the folder once, before it reads the model, and again if a file's inode, size or timestamps change. Other
changes on the disk are detected by the next process only.

A user's folder has no record. Its digest is part of the stage keys, so different content has different keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

from components.artifacts.keys import file_digest, json_digest
from components.errors import ResourceError
from components.json_text import parse_json
from components.trajectories.schema import VOCABULARY

ENDINGS = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Suffixes of a model's files."""

_Signature = tuple[int, ...]
_lock = threading.Lock()
_digests: dict[_Signature, str] = {}
"""SHA-256 of each file that this process has read, by the file's status at that time. Links to a file share it."""


def belongs(name: str) -> bool:
    """Return True if a file of this name at the top of a model's folder is part of the model."""
    return name.endswith(ENDINGS) and not name.startswith("consolidated")


def folder_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a model's files."""
    return json_digest(_contents(folder))


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a digest of the rules by which a tokenizer turns text into token ids. An export, which has a chat template
    and decoders of its own, has that of its policy."""
    backend, parts = getattr(tokenizer, "backend_tokenizer", None), [sorted(tokenizer.get_vocab().items())]
    if backend is not None:
        rules = json.loads(backend.to_str())
        parts = [rules[name] for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")]
    return f"{VOCABULARY}{json_digest(parts)}"


def write_record(record: Path, folder: Path, revision: str | None) -> str | None:
    """Write the record of a complete folder, atomically.

    revision: hub commit of the files. Returns the names of files that differ from an earlier record of the same model,
    or None if there is no difference.
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
    """Return a record with `files` and `revision`; None if it is missing or invalid."""
    try:
        data = parse_json(record.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get("files"), dict) and data["files"] else None


def damage(record: Path, folder: Path) -> str | None:
    """Return the first difference between a folder and its record; None if they match."""
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
    """Return the SHA-256 of a file, cached per process while the file's status is unchanged."""
    try:
        before = _signature(path)
        with _lock:
            cached = _digests.get(before)
        if cached is not None:
            return cached
        digest = file_digest(path)
        if _signature(path) == before:
            with _lock:
                _digests[before] = digest
    except OSError as error:
        raise ResourceError(f"the model file {path} cannot be read: {error.strerror or error}") from None
    return digest


def _signature(path: Path) -> _Signature:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_blob(file: Path) -> bool:
    """Return True if a file of the hub's cache matches the digest in its name: a SHA-256, or git's SHA-1. Names that
    are no digests, as from some mirrors, count as matching."""
    if re.fullmatch(r"[0-9a-f]{64}", file.name):
        return file_digest(file) == file.name
    if re.fullmatch(r"[0-9a-f]{40}", file.name):
        content = file.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == file.name
    return True
