"""What is measured from outside: an endpoint and the measured code in processes of their own.

A measured process is a benchmark's own file, called with `--form NAME --url URL` and what else is given. When it has
warmed up it prints `begin` and waits for a line; at its end it prints its figures as JSON. It may be another
interpreter, without our packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STUB = Path(__file__).resolve().with_name("stub.py")
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would look for prices on the net
    "OPENAI_API_KEY": "none",
    "TQDM_DISABLE": "1",
    "WANDB_MODE": "disabled",
    "WEAVE_DISABLED": "true",
}


@contextlib.contextmanager
def stub(*options: object) -> Iterator[str]:
    """The address of an endpoint (`stub.py`, with its options) in a process of its own."""
    command = [sys.executable, str(STUB), *map(str, options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def in_own_process(python: str, script: str, form: str, url: str, *options: object) -> dict[str, float]:
    """Its figures, and `peak`: bytes that were resident at most, beyond what was there when it began."""
    command = [python, str(Path(script).resolve()), "--form", form, "--url", url, *map(str, options)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, **pipes, stderr=errors, cwd="/", env={**os.environ, **QUIET}) as process,
    ):
        assert process.stdout is not None
        while (line := process.stdout.readline()) not in ("begin\n", ""):
            pass
        with peak(process.pid) as most:
            said = process.communicate("\n")[0] if line else ""
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{form} failed:\n{errors.read()[-4000:]}")
    return json.loads(said.splitlines()[-1]) | {"peak": most[0] - most[1]}


@contextlib.contextmanager
def peak(pid: int) -> Iterator[list[int]]:
    """The most bytes that are resident in a process within the block, looked at two hundred times a second from
    outside, and those at its start."""
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        try:
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
        except OSError:  # it has ended
            return 0

    most, over = [resident()] * 2, threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], resident())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
