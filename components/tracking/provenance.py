"""Provenance of a run: git commit and package versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "espalier", "torch", "transformers", "peft", "accelerate", "mlflow", "prefect", "hydra-core", "litellm",
    "skypilot", "vllm", "numpy", "pyarrow", "safetensors",
)  # fmt: skip
"""Packages whose versions can affect a result."""


def package_versions() -> dict[str, str]:
    """Return the versions of the installed ones of `PACKAGES`, by name."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit(folder: Path) -> str | None:
    """Return the commit checked out in `folder`, with `-dirty` if tracked files differ from it; None without git, or if
    the folder is not the root of a repository: a virtual environment may lie within the user's."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None if completed.returncode == 0 else None


def command_path(name: str) -> str:
    """Return the shell command for a program of this environment: its name if it is on the path, else its full path."""
    return name if shutil.which(name) else str(Path(sys.executable).with_name(name))
