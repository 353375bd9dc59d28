"""Packages that the benchmark needs, at the versions of `requirements/lock.txt`."""

from __future__ import annotations

from pathlib import Path

LOCK = Path(__file__).resolve().parents[3] / "requirements" / "lock.txt"
NEEDED = (
    "accelerate", "aiohttp", "datasets", "fsspec", "httpx", "hydra-core", "ijson", "jinja2", "jsonschema", "numpy",
    "omegaconf", "orjson", "peft", "psutil", "pyarrow", "pydantic", "regex", "rich", "safetensors", "tokenizers",
    "torch", "transformers", "trl", "uvicorn", "fastapi", "uvloop",
)  # fmt: skip
"""Direct requirements; their own requirements come with them."""


def requirements() -> list[str]:
    """Return the requirements with their versions."""
    locked = {
        name.strip().lower(): line.strip()
        for line in LOCK.read_text(encoding="utf-8").splitlines()
        if "==" in line and (name := line.partition("==")[0])
    }
    return [locked.get(name, name) for name in NEEDED]
