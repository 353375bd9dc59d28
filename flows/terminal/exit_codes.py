"""Message and exit code for an error, or an interruption, that ends a command."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

from components.errors import EspalierError, ResourceError, SpecError
from components.exceptions import described, out_of_space, place
from components.redaction import mask_text
from flows.terminal.console import printable_lines
from flows.terminal.interrupt import EXIT_CODE

P = ParamSpec("P")


def describe_error(error: BaseException) -> tuple[str, int] | None:
    """Return (message, exit code), or None for an unexpected error, which deserves its stack trace. An exception of the
    user's code is described by the line that raised it; its traceback goes to the log."""
    if isinstance(error, SpecError | ResourceError):
        return mask_text(str(error)), 1 if out_of_space(error) else 2
    if isinstance(error, EspalierError):
        return mask_text(f"{type(error).__name__}: {error}"), 1
    if isinstance(error, Exception) and (detail := out_of_space(error)) is not None:
        if "too large" in detail:
            limit = "a file reached the size limit of the file system or of the process (`ulimit -f`)"
            return f"{limit} ({detail}). Raise the limit, then run the same command again to resume", 1
        return f"no space left on the disk of root ({detail}). Free space, then run the same command again to resume", 1
    if isinstance(error, Exception) and place(error):
        return mask_text(described(error)), 1
    return None


def print_error(error: EspalierError) -> int:
    """Print the message of an error that ends a command on stderr; return the command's exit code."""
    message_and_code = describe_error(error)
    assert message_and_code is not None
    message, code = message_and_code
    print_message(message)
    return code


def with_exit_codes(main: Callable[P, int]) -> Callable[P, int]:
    """Return a command that prints the message of an error and returns its exit code; 130 if it was interrupted."""

    @functools.wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except EspalierError as error:
            return print_error(error)
        except KeyboardInterrupt:
            return EXIT_CODE

    return command


def print_message(message: object) -> None:
    """Print a message that may quote foreign text, such as the answer of a server, on stderr: secrets masked, control
    codes of terminals replaced."""
    print(printable_lines(mask_text(str(message)).splitlines()), file=sys.stderr, flush=True)
