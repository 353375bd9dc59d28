"""Root of the runs of a bisection.

It is that of the two runs, whose cached stages are reused, unless the code of a stage differs between them: then code
may be the cause. The key of a stage says nothing about it, so the runs get a root of their own,
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
from flows.history.code import CodeRecords
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


def edited_stages(ends: Ends, code: CodeRecords) -> dict[str, list[str]]:
    """Return the labels of the stages of each run, by `good` and `bad`, whose code has changed since. Empty if the code
    of the two runs is the same."""
    if not any(code.differ(first.code, second.code) for first, second in ends.common):
        return {}
    labels = {"good": edited(ends.good.record), "bad": edited(ends.bad.record)}
    return {name: stages for name, stages in labels.items() if stages}


def workspace(root: Path, ends: Ends, parent: Path | None = None) -> Path:
    """Return the root of the runs of a bisection, created if it is not that of the two runs. parent: folder in which it
    is created, in place of `<root>/bisect`. Raises ResourceError."""
    if not edited_stages(ends, CodeRecords(root)):
        return root
    stages = [*ends.good.record.stages, *ends.bad.record.stages]
    code = {stage.key: present_code(stage) for stage in stages}
    good, bad = ends.good.record, ends.bad.record
    folder = (parent or root / FOLDER) / f"{good.short}-{bad.short}-{code_digest(code)[:8]}"
    computed = {stage.key for stage in stages}
    inputs = {key for stage in stages for key in stage.request["inputs"].values()} - computed
    current = {stage.key for stage in stages if stage.code == code[stage.key]}
    try:
        (folder / RECORDS).mkdir(parents=True, exist_ok=True)
        for record in (root / RECORDS).glob("*.json"):
            shutil.copy2(record, folder / RECORDS)
        artifacts = [f"artifacts/{key}" for key in current | inputs]
        for name in ("models", f"{RECORDS}/code", *artifacts):
            source, target = root / name, folder / name
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
