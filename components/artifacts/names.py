"""Validation of artifact keys and of the file names in a manifest.

A name is a relative path of plain segments separated by "/". It must denote the same file on any file system, case
sensitive or not, and in any object store. Rejected are names that a path library would normalise, that two file
systems would interpret differently, or that a terminal would not display as they are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

SEGMENT_BYTES = 255
"""Maximum length of a segment in UTF-8 bytes: the limit of most file systems."""
NAME_BYTES = 700
"""Maximum length of a name in UTF-8 bytes: with the store's prefix and the key it must fit an object store's 1,024."""
SEGMENTS = 32
"""Maximum number of segments of a name."""
FILES = 10_000
"""Maximum number of files of an artifact."""

_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
_FORBIDDEN = re.compile(r'[\\:*?"<>|]')


def is_key(text: object) -> bool:
    """Return True if a value can be the key of an artifact: one plain segment without a dot."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def check_names(names: Iterable[str], reserved: str) -> None:
    """Raise ValueError, quoting the first invalid name, if names cannot be the files of one artifact.

    reserved: name that the store itself uses.
    """
    taken: dict[str, str] = {_folded(reserved): reserved}
    folders: dict[str, str] = {}
    for number, name in enumerate(names):
        if number >= FILES:
            raise ValueError(f"an artifact has at most {FILES} files")
        _check_name(name)
        folded = _folded(name)
        parents = [folded[:end] for end, letter in enumerate(folded) if letter == "/"]
        if other := taken.get(folded) or folders.get(folded):
            raise ValueError(f"{name!a} and {other!a} are the same path, or a file and a folder of one path")
        if other := next((taken[parent] for parent in parents if parent in taken), None):
            raise ValueError(f"{name!a} is below {other!a}, which is a file")
        taken[folded] = name
        folders.update(dict.fromkeys(parents, name))


def _check_name(name: str) -> None:
    segments = name.split("/")
    if any(segment in ("", ".", "..") for segment in segments):
        raise ValueError(f"{name[:100]!a} is not a file below the artifact's folder; expected a relative path")
    if not name.isprintable() or any(segment != segment.strip() or segment.endswith(".") for segment in segments):
        raise ValueError(f"{name[:100]!a} contains a control character, or a segment that ends in a space or a dot")
    if _FORBIDDEN.search(name):
        raise ValueError(f'{name[:100]!a} contains one of \\ : * ? " < > |')
    sizes = [len(segment.encode()) for segment in segments]
    if len(segments) > SEGMENTS or max(sizes) > SEGMENT_BYTES or len(name.encode()) > NAME_BYTES:
        raise ValueError(
            f"{name[:100]!a} is too long; expected at most {SEGMENTS} segments of {SEGMENT_BYTES} bytes, "
            f"{NAME_BYTES} bytes in all"
        )


def _folded(name: str) -> str:
    """Return the name as a file system that ignores case and normalises accents compares it."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
