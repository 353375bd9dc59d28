"""Settings of runs and their differences: those that affect results, and the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.deployment.card import PLACEMENT
from components.specs.component_path import key_name
from flows.history.code import CodeRecords, code_by_kind
from flows.history.records import RunRecord
from flows.history.store_reader import StoreReader, targets

NEUTRAL_KEYS = PLACEMENT - {"fork"}
"""Keys of a configuration, at any depth, that do not affect results. The start of a fork does."""
MISSING = "–"
CODE = ("version of ", "source of ")
"""Beginnings of the rows that describe code."""


@dataclass(frozen=True)
class SettingDifferences:
    """Differences between the settings of runs: by path, the value in each run."""

    relevant: dict[tuple[str, ...], list[Any]]
    """Settings that affect results."""
    neutral: dict[tuple[str, ...], list[Any]]
    """Settings that do not, such as machine, speed and names."""
    versions: dict[tuple[str, ...], list[Any]]
    """Versions of stages, and digests of the user's code."""


def setting_differences(runs: Sequence[RunRecord], readers: Sequence[StoreReader]) -> SettingDifferences:
    """Return the differences between the settings of runs. readers: of the store of each run."""
    pairs = list(zip(runs, readers, strict=True))
    specs = [with_defaults(run.spec, resolved_targets(run, reader)) for run, reader in pairs]
    differences = dict(differing(specs))
    relevant = {path: values for path, values in differences.items() if affects_results(path, specs)}
    neutral = {path: values for path, values in differences.items() if path not in relevant}
    return SettingDifferences(relevant, neutral, dict(differing([code_versions(run, reader) for run, reader in pairs])))


def code_texts(records: CodeRecords, runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return the code of each run's stages by kind, as text: the digest, and for a later run the modules that differ
    from the first run's. Equal for runs whose common modules are equal."""
    first, *others = [code_by_kind(run) for run in runs]
    texts = [{f"code of {kind}": _short_code(digests) for kind, digests in first.items() if digests}]
    for code in others:
        rows = {}
        for kind, digests in code.items():
            before = first.get(kind) or digests
            modules = {name for old in before for new in digests for name in records.differing_modules(old, new)}
            stored = all(records.modules(digest) for digest in [*before, *digests])
            if digests:
                same = before == digests or (stored and not modules)
                text = _short_code(before if same else digests)
                rows[f"code of {kind}"] = f"{text}: {', '.join(sorted(modules))}" if modules else text
        texts.append(rows)
    return texts


def _short_code(digests: Sequence[str]) -> str:
    return ", ".join(digest[:12] for digest in digests)


def code_versions(run: RunRecord, reader: StoreReader) -> dict[str, Any]:
    """Return the versions of a run's stages and the digests of the user's code, which affect results beside the
    configuration."""
    code: dict[str, Any] = {}
    for stage in run.stages:
        code[f"{CODE[0]}{stage.request['stage']}"] = stage.version
        manifest = reader.manifest(stage.key)
        for target in targets(manifest["spec"] if manifest else {}).values():
            if "source_sha256" in target:
                code[f"{CODE[1]}{target['_target_']}"] = target["source_sha256"][:12]
    return {name: code[name] for name in sorted(code)}


def resolved_targets(run: RunRecord, reader: StoreReader) -> list[Mapping[str, Any]]:
    """Return the targets of a run's stages, with all arguments of their signatures."""
    manifests = [reader.manifest(stage.key) for stage in run.stages]
    return [target for manifest in manifests if manifest for target in targets(manifest["spec"]).values()]


def with_defaults(spec: Any, resolved: Sequence[Mapping[str, Any]]) -> Any:
    """Return a spec whose targets have all arguments, so that an explicit default value is no difference. A target that
    no stage has resolved stays unchanged."""
    if not isinstance(spec, Mapping):
        return spec
    complete: Mapping[str, Any] = {}
    if isinstance(path := spec.get("_target_"), str):
        stated = {**spec, "_target_": key_name(path)}
        complete = next((target for target in resolved if stated.items() <= target.items()), {})
    return {**complete, **{name: with_defaults(value, resolved) for name, value in spec.items()}}


def differing(values: Sequence[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Yield (path, value in each spec) of each difference; an absent value is `MISSING`."""
    if all(isinstance(value, Mapping) for value in values):
        for name in dict.fromkeys(name for value in values for name in value):
            yield from differing([value.get(name, MISSING) for value in values], (*path, name))
    elif any(value != values[0] for value in values):
        yield path, list(values)


def affects_results(path: tuple[str, ...], specs: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a key of the configuration affects results. Every argument of a target does."""
    if path[0] in NEUTRAL_KEYS | {"name"}:
        return False
    levels: list[Any] = list(specs)
    for name in path:
        if any(isinstance(level, Mapping) and "_target_" in level for level in levels):
            return True
        if name in NEUTRAL_KEYS:
            return False
        levels = [level.get(name) if isinstance(level, Mapping) else None for level in levels]
    return True


def as_texts(differences: Mapping[tuple[str, ...], Sequence[Any]]) -> dict[str, list[str]]:
    return {
        ".".join(path): [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        for path, values in differences.items()
    }
