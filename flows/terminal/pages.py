"""HTML pages that commands write."""

from __future__ import annotations

from pathlib import Path

from components.errors import ResourceError


def write_page(path: Path, html: str) -> Path:
    """Write a page and return its absolute path. Raises ResourceError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}; give another file: --html FILE") from None
    return path.absolute()
