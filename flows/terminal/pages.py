"""HTML pages that commands write."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from components.errors import ResourceError


def write_new_page(folder: Path, name: str, html: str) -> Path:
    """Write a page as `NAME-TIME.html`, with a number if another command of the same second has that file. Return and
    raise as `write_page`."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, numbers = folder / f"{stem}.html", count(2)
    with suppress(OSError):  # `write_page` reports it
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.touch(exist_ok=False)
                break
            except FileExistsError:
                path = folder / f"{stem}-{next(numbers)}.html"
    return write_page(path, html)


def write_page(path: Path, html: str) -> Path:
    """Write a page and return its absolute path. Raises ResourceError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}; give another file: --html FILE") from None
    return path.absolute()
