"""What a run was made with: git commit and package versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "espalier", "torch", "transformers", "peft", "trl", "accelerate", "mlflow", "prefect", "hydra-core", "litellm",
    "skypilot", "vllm", "numpy", "pyarrow", "safetensors",
)  # fmt: skip
"""Packages whose versions can change a result."""


def package_versions() -> dict[str, str]:
    """Versions of those packages that are installed, by name."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(folder: Path) -> str | None:
    """Commit that is checked out in `folder`, with `-dirty` where tracked files differ from it; None where there is no
    git or no repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def command_path(name: str) -> str:
    """What to type for a command of this environment: its name where the shell finds it, else its full path."""
    return name if shutil.which(name) else str(Path(sys.executable).with_name(name))
