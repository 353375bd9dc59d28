"""Root of the runs of a bisection.

It is that of the two runs, whose cached stages are reused, unless the code of a stage of theirs has changed since. Then
the key of such a stage names a result of other code, so the runs get a root of their own,
`<root>/bisect/GOOD-BAD-CODE`, with hard links to the artifacts that the present code computed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.errors import ResourceError
from components.specs.code import code_digest
from flows.bisection.ends import Ends
from flows.bisection.provenance import edited, present_code
from flows.history.records import FOLDER as RECORDS

FOLDER = "bisect"

NOT_REPEATED: Mapping[str, Mapping[str, Any]] = {
    "deploy": {"mode": "none", "approve": False, "target": None},
    "notify": {"url_variable": None, "prefect": False},
}
"""Settings of the runs of a bisection, which export, deploy and report nothing."""


def settings(spec: Mapping[str, Any], root: Path, shared_root: Path) -> dict[str, Any]:
    """Return the settings of a run of the bisection below `root`. shared_root: that of the two runs."""
    data = {**spec, "root": str(root)}
    for section, values in NOT_REPEATED.items():
        data[section] = {**(spec.get(section) or {}), **values}
    if root != shared_root:
        data["store"] = None  # it holds results of other code
    return data


def edited_stages(ends: Ends) -> dict[str, list[str]]:
    """Return the labels of the stages of each run, by `good` and `bad`, whose code has changed since."""
    labels = {"good": edited(ends.good.record), "bad": edited(ends.bad.record)}
    return {name: stages for name, stages in labels.items() if stages}


def workspace(root: Path, ends: Ends) -> Path:
    """Return the root of the runs of a bisection, created if it is not that of the two runs. Raises ResourceError."""
    if not edited_stages(ends):
        return root
    stages = [*ends.good.record.stages, *ends.bad.record.stages]
    code = {stage.key: present_code(stage) for stage in stages}
    good, bad = ends.good.record, ends.bad.record
    folder = root / FOLDER / f"{good.short}-{bad.short}-{code_digest(code)[:8]}"
    made = {stage.key for stage in stages}
    inputs = {key for stage in stages for key in stage.request["inputs"].values()} - made
    current = {stage.key for stage in stages if stage.code == code[stage.key]}
    try:
        (folder / RECORDS).mkdir(parents=True, exist_ok=True)
        for record in (root / RECORDS).glob("*.json"):
            shutil.copy2(record, folder / RECORDS)
        for source, target in [(root / "models", folder / "models")] + [
            (root / "artifacts" / key, folder / "artifacts" / key) for key in current | inputs
        ]:
            if source.is_dir() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(source, target, copy_function=_link)
    except OSError as error:
        raise ResourceError(f"cannot write {folder}: {error.strerror or error}") from None
    return folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
