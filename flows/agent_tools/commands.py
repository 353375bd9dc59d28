"""Commands of Espalier as subprocesses, with argument lists and without a shell.

The command validates its arguments itself, so its error messages reach the agent as they are. A stack trace, which only
a defect prints, is replaced by its last line. All texts are masked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from components.errors import EspalierError, ResourceError, WaitTimeout
from components.redaction import mask, mask_text
from flows.execution.executor import environment

LIMIT = 600.0
"""Timeout of a command that is not a job, in seconds."""
MOST_TEXT = 8000
"""Maximum number of characters of an error message: the end of it."""
_TRACE = "Traceback (most recent call last)"


def command(name: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of `python -m flows.NAME`."""
    return [sys.executable, "-m", f"flows.{name}", *arguments]


async def result_of(name: str, arguments: Sequence[str], limit: float = LIMIT) -> dict[str, Any]:
    """Run a command with `--json` and return the object that it prints.

    Raises ResourceError with the command's message if it fails, and WaitTimeout after `limit` seconds.
    """
    process = await asyncio.create_subprocess_exec(
        *command(name, arguments),
        "--json",
        env=environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # it is killed with its children
    )
    try:
        out, error = await asyncio.wait_for(process.communicate(), limit)
    except TimeoutError:
        raise WaitTimeout(f"flows.{name} did not end within {limit:.0f} s") from None
    finally:
        if process.returncode is None:  # the client cancelled the call, or the time is over
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise ResourceError(error_message(f"flows.{name}", error.decode(errors="replace")))
    return last_object(out.decode(errors="replace"), f"flows.{name}")


def last_object(text: str, name: str) -> dict[str, Any]:
    """Return the JSON object in the last line of a command's output, with masked secrets. Raises EspalierError."""
    try:
        data = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        data = None
    if not isinstance(data, dict):
        raise EspalierError(f"{name} printed no JSON object")
    masked: dict[str, Any] = mask(data)
    return masked


def error_message(name: str, error: str) -> str:
    """Return the message of a failed command from its standard error."""
    lines = error.strip().splitlines()
    if _TRACE in error:
        return mask_text(f"{name} failed unexpectedly: {lines[-1]}")[-MOST_TEXT:]
    return mask_text("\n".join(lines) or f"{name} failed without a message")[-MOST_TEXT:]
