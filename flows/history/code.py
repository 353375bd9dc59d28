"""Code of recorded stages: `<root>/records/code/DIGEST.json`, the module digests behind the digest of a stage's code.

A stage's record and its manifest hold one digest. The files say which modules it covers, so that two stages can be
compared module by module. A file is written once for each version of a stage's code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from components.json_text import parse_json, write_json
from components.specs.code import code_digest
from flows.history.records import FOLDER, RunRecord, StageRecord


class CodeRecords:
    """Module digests of stages below one root."""

    def __init__(self, root: Path):
        self._folder = root / FOLDER / "code"

    def add(self, modules: dict[str, str]) -> None:
        """Store the module digests of a stage's code, unless they are stored. An error of the disk is ignored: this is
        information only."""
        path = self._folder / f"{code_digest(modules)}.json"
        if modules and not path.exists():
            with contextlib.suppress(OSError):
                write_json(path, modules)

    def modules(self, digest: str) -> dict[str, str]:
        """Return the module digests of a stage's code; empty if they are not stored here or do not fit the digest."""
        if len(digest) != 64 or not digest.isalnum():
            return {}
        try:
            data = (self._folder / f"{digest}.json").read_bytes()
            modules = TypeAdapter(dict[str, str]).validate_python(parse_json(data))
        except (OSError, ValueError):
            return {}
        return modules if code_digest(modules) == digest else {}

    def differ(self, before: str, after: str) -> bool:
        """Return True if two recorded versions of a stage's code differ in a module that both have, or if modules are
        not stored."""
        if not before or not after or before == after:
            return False
        stored = self.modules(before) and self.modules(after)
        return not stored or bool(self.differing_modules(before, after))

    def differing_modules(self, before: str, after: str) -> list[str]:
        """Return the modules that both versions of a stage's code have and that differ. A module that only one has
        belongs to a component that only one uses."""
        first, second = self.modules(before), self.modules(after)
        return sorted(name for name in first.keys() & second.keys() if first[name] != second[name])


def code_by_kind(run: RunRecord) -> dict[str, list[str]]:
    """Return the digests of the code of a run's stages by kind of stage, in the order of the stages."""
    code: dict[str, list[str]] = {}
    for stage in run.stages:
        digests = code.setdefault(str(stage.request["stage"]), [])
        if stage.code and stage.code not in digests:
            digests.append(stage.code)
    return code


def differing_code(records: CodeRecords, stages: Sequence[tuple[StageRecord, StageRecord]]) -> dict[str, list[str]]:
    """Return the modules that differ between the code of paired stages, by label; only stages with a difference."""
    modules = {first.label: records.differing_modules(first.code, second.code) for first, second in stages}
    return {label: names for label, names in modules.items() if names}
