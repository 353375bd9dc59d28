"""Causes outside the settings: data, versions and code of stages, and packages.

With equal settings, two runs differ from the first stage on whose key or digest differs. Another version of the stage
or another source digest is code, another content digest is data. If the key is equal and only the bytes differ, the
recorded code of the stage and the package versions are the candidates.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.errors import ResourceError
from components.specs.code import code_digest
from flows.bisection.ends import Ends, EvaluatedRun
from flows.history.code import CodeRecords
from flows.history.records import FOLDER as RECORDS
from flows.history.records import RunRecord, StageRecord
from flows.planning.earlier_stages import differences
from flows.stages.base import Request
from flows.stages.code import stage_code
from flows.stages.execute import stage_and_spec

SOURCE = "source_sha256"
"""Name of the digest of a user's code in the settings of a stage."""


def present_code(stage: StageRecord) -> str:
    """Return the digest of the present code of a recorded stage; empty if its request is no longer valid."""
    from components.errors import SpecError

    try:
        return code_digest(stage_code(*stage_and_spec(Request.from_json(stage.request))))
    except SpecError:
        return ""


def edited(run: RunRecord) -> list[str]:
    """Return the labels of the stages whose recorded code differs from the present code."""
    return [stage.label for stage in run.stages if stage.code and stage.code != present_code(stage)]


def differing_packages(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, list[str | None]]:
    """Return the packages whose versions differ, with both versions; None for one that is not installed."""
    names = sorted(before.keys() | after.keys())
    return {name: [before.get(name), after.get(name)] for name in names if before.get(name) != after.get(name)}


def outside_cause(good: EvaluatedRun, bad: EvaluatedRun, code: CodeRecords) -> dict[str, Any] | None:
    """Return the cause of a difference between two runs with equal settings; None if their stages are equal."""
    by_label = {stage.label: stage for stage in good.record.stages}
    pairs = [(by_label[stage.label], stage) for stage in bad.record.stages if stage.label in by_label]
    first = next(((a, b) for a, b in pairs if (a.key, a.digest) != (b.key, b.digest)), None)
    if first is None:
        return None
    before, after = first
    changes = _changed_spec(before, after, good, bad)
    modules = {a.label: names for a, b in pairs if (names := code.differing_modules(a.code, b.code))}
    packages = differing_packages(good.record.packages, bad.record.packages)
    versions = [before.version, after.version]
    sources = [entry for entry in changes if entry["key"].endswith(SOURCE)]
    data = [entry for entry in changes if entry not in sources]
    facts = {
        "stage": before.label,
        "modules": modules,
        "commits": {"good": good.record.git_commit, "bad": bad.record.git_commit},
        "packages": packages,
    }
    if versions[0] != versions[1] or sources:
        return {"kind": "code", **facts, "version": versions if versions[0] != versions[1] else None, "source": sources}
    if data:
        return {"kind": "data", **facts, "data": data}
    if modules:
        return {"kind": "code", **facts, "version": None, "source": []}
    return {"kind": "packages" if packages else "unknown", **facts}


def _changed_spec(
    before: StageRecord, after: StageRecord, good: EvaluatedRun, bad: EvaluatedRun
) -> list[dict[str, str]]:
    """Return the differences between the parts of the settings in the keys of two stages."""
    manifests = [good.reader.manifest(before.key), bad.reader.manifest(after.key)]
    if None in manifests:
        return []
    first, second = (manifest["spec"] or {} for manifest in manifests if manifest is not None)
    return [{"key": item.path, "good": item.before, "bad": item.after} for item in differences(first, second)]


def cause_text(cause: Mapping[str, Any]) -> list[str]:
    """Return lines on a cause outside the settings."""
    lines = {
        "code": f"code, from {cause['stage']} on",
        "data": f"data, from {cause['stage']} on",
        "packages": f"package versions, from {cause['stage']} on",
        "unknown": f"unknown: {cause['stage']} gave other bytes with the same key, recorded code and package versions "
        "(another processor, or code of the runs that was not recorded)",
    }
    text = [lines[cause["kind"]]]
    if cause.get("version"):
        text.append("  version of the stage: {} → {}".format(*cause["version"]))
    text += [f"  {entry['key']}: {entry['good']} → {entry['bad']}" for entry in cause.get("source") or []]
    text += [f"  {entry['key']}: {entry['good']} → {entry['bad']}" for entry in cause.get("data", [])]
    if cause["kind"] == "code":
        text += [f"  {label}: {', '.join(names)}" for label, names in cause["modules"].items()]
        commits = cause["commits"]
        text.append(f"  commit: {commits['good'] or 'not recorded'} → {commits['bad'] or 'not recorded'}")
    if cause["kind"] in ("code", "packages"):
        text += [
            f"  {name}: {old or 'not installed'} → {new or 'not installed'}"
            for name, (old, new) in cause["packages"].items()
        ]
    return text


WORKSPACES = "bisect"
"""Folder of the workspaces below the root."""

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
    """Return the root of the runs of a bisection, created if it is not that of the two runs.

    It is that of the two runs, whose cached stages are reused, unless the code of a stage differs between them: then
    code may be the cause. The key of a stage says nothing about it, so the runs get a root of their own,
    `<root>/bisect/GOOD-BAD-CODE`, with hard links to the artifacts that the present code computed. parent: folder in
    which it is created, in place of `<root>/bisect`. Raises ResourceError."""
    if not edited_stages(ends, CodeRecords(root)):
        return root
    stages = [*ends.good.record.stages, *ends.bad.record.stages]
    code = {stage.key: present_code(stage) for stage in stages}
    good, bad = ends.good.record, ends.bad.record
    folder = (parent or root / WORKSPACES) / f"{good.short}-{bad.short}-{code_digest(code)[:8]}"
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
