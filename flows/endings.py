"""What a person is told of an error that ends a run, and the exit code."""

from __future__ import annotations

import errno

from components.errors import EspalierError, ResourceError, SpecError
from components.redaction import mask_text


def told(error: BaseException) -> tuple[str, int] | None:
    """(message, exit code); None for what nobody foresaw."""
    if isinstance(error, SpecError | ResourceError):
        return mask_text(str(error)), 2
    if isinstance(error, EspalierError):
        return mask_text(f"{type(error).__name__}: {error}"), 1
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return f"no space left on the disk of root{where}: make room, then the same command goes on from here", 1
    return None
