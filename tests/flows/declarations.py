"""Comparison of an artifact with the declaration of its stage."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from flows.stages import STAGES
from flows.stages.base import input_pattern


def check_artifact(folder: Path) -> str:
    """Fail if the artifact in a folder of a store has a file or an input that its stage does not declare, or lacks a
    file that is not optional. Return the name of the stage."""
    manifest = _manifest(folder)
    stage, names = STAGES[manifest["stage"]], list(manifest["files"])
    patterns = {name: f"{name}*" if name.endswith("/") else name for name in stage.files}
    undeclared = [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns.values())]
    missing = [
        name
        for name, pattern in patterns.items()
        if name not in stage.optional and not any(fnmatch(file, pattern) for file in names)
    ]
    assert (undeclared, missing) == ([], []), stage.name
    for name, entry in manifest["inputs"].items():
        kinds = [kind for declared, kind in stage.inputs.items() if re.fullmatch(input_pattern(declared), name)]
        assert _manifest(folder.parent / entry["key"])["kind"] in " or ".join(kinds).split(" or "), (stage.name, name)
    return stage.name


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())
