"""What a person is told of an error that ends a run, and the exit code."""

from __future__ import annotations

from components.errors import EspalierError, ResourceError, SpecError
from components.exceptions import out_of_space
from components.redaction import mask_text


def told(error: BaseException) -> tuple[str, int] | None:
    """(message, exit code); None for what nobody foresaw."""
    if isinstance(error, SpecError | ResourceError):
        return mask_text(str(error)), 1 if out_of_space(error) else 2
    if isinstance(error, EspalierError):
        return mask_text(f"{type(error).__name__}: {error}"), 1
    if isinstance(error, Exception) and (detail := out_of_space(error)) is not None:
        if "too large" in detail:
            what = "a file may not grow further: the limit is that of the file system, or of the process (`ulimit -f`)"
            return f"{what} ({detail}). Raise it, then the same command goes on from here", 1
        return f"no space left on the disk of root ({detail}): make room, then the same command goes on from here", 1
    return None
