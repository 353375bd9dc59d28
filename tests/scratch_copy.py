"""A copy of the repository, to which a test adds files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("components", "conf", "flows", "hydra_plugins", "pyproject.toml")


def run_in_copy(copy: Path, files: Mapping[str, str], code: str) -> str:
    """Return what the code prints in a copy of the repository with additional files, by path."""
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    for path, text in files.items():
        assert not (copy / path).exists(), path
        (copy / path).write_text(text)
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
