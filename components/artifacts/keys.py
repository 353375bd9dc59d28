"""Digests of data: stage keys and artifact contents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def stage_key(stage: str, version: int, spec: Mapping[str, Any], inputs: Mapping[str, str], seed: int) -> str:
    """Return the key of a stage: sha256 (hex) over the canonical JSON of its arguments.

    `spec` is the part of the configuration that the stage reads, as JSON data; `inputs` maps names to content digests.
    The order of mappings does not matter. Raises TypeError for data that is not JSON, ValueError for NaN and infinity.
    """
    return json_digest({"stage": stage, "version": version, "spec": spec, "inputs": inputs, "seed": seed})


def json_digest(value: Any) -> str:
    """Return the sha256 (hex) over a value as JSON with sorted keys. Raises as `stage_key` does."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 (hex) of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _canonical(value: Any) -> str:
    _check_keys(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _check_keys(value: Any) -> None:
    """Raise TypeError for a key that is not text: JSON would map the keys 1 and "1" to the same text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a mapping in a stage key has the key {key!r}; only text is allowed")
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)
