"""Changes between the settings of two runs: the smallest groups of keys that give a valid experiment on their own.

A key that is not valid alone is changed together with the other differing keys of its section: an argument of another
reward, for example, only exists with that reward. Sections that are not valid alone either are changed together.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flows.reporting.settings import MISSING
from flows.terminal.console import shorten

Path = tuple[str, ...]
"""Names of a dotted key."""


@dataclass(frozen=True)
class SettingChange:
    """Settings that are changed together."""

    paths: tuple[Path, ...]
    before: tuple[Any, ...]
    """Values in the good run; MISSING for an absent key."""
    after: tuple[Any, ...]
    """Values in the bad run."""

    @property
    def key(self) -> str:
        """Dotted key, or that of the section with all keys of the change; the keys if they have no common section."""
        if len(self.paths) == 1:
            return ".".join(self.paths[0])
        shared = _section(self.paths)
        return ".".join(shared) if shared else ", ".join(".".join(path) for path in self.paths)

    def to_json(self) -> dict[str, Any]:
        """Return the change as JSON data."""
        keys = {
            ".".join(path): {"good": before, "bad": after}
            for path, before, after in zip(self.paths, self.before, self.after, strict=True)
        }
        good, bad = (self.before[0], self.after[0]) if len(self.paths) == 1 else (None, None)
        return {"key": self.key, "good": good, "bad": bad, "settings": keys}

    def overrides(self) -> list[str]:
        """Return the change as overrides of a command."""
        return [
            f"~{'.'.join(path)}" if value == MISSING else f"{'.'.join(path)}={json.dumps(value, ensure_ascii=False)}"
            for path, value in zip(self.paths, self.after, strict=True)
        ]

    def text(self) -> str:
        """Return the change as text: `key: good → bad`."""
        pairs = list(zip(self.paths, self.before, self.after, strict=True))
        if len(pairs) == 1:
            return f"{self.key}: {_text(self.before[0])} → {_text(self.after[0])}"
        texts = [f"{'.'.join(path)}: {_text(before)} → {_text(after)}" for path, before, after in pairs[:4]]
        return "; ".join([*texts, *([f"{len(pairs) - 4} more"] if len(pairs) > 4 else [])])


def _text(value: Any) -> str:
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 60)


def _section(paths: Sequence[Path]) -> Path:
    """Return the longest common beginning of the paths."""
    shared = paths[0]
    for path in paths[1:]:
        count = next((i for i, (a, b) in enumerate(zip(shared, path, strict=False)) if a != b), min(map(len, paths)))
        shared = shared[:count]
    return shared


def lookup(spec: Any, path: Path) -> Any:
    """Return the value of a key; MISSING if it is absent."""
    for name in path:
        if not isinstance(spec, Mapping) or name not in spec:
            return MISSING
        spec = spec[name]
    return spec


def applied(spec: Mapping[str, Any], changes: Iterable[SettingChange]) -> dict[str, Any]:
    """Return a copy of the spec with the changes."""
    data: dict[str, Any] = copy.deepcopy(dict(spec))
    for change in changes:
        for path, value in zip(change.paths, change.after, strict=True):
            section = data
            for name in path[:-1]:
                if not isinstance(section.get(name), dict):
                    section[name] = {}
                section = section[name]
            if value == MISSING:
                section.pop(path[-1], None)
            else:
                section[path[-1]] = copy.deepcopy(value)
    return data


def changes_between(
    good: Mapping[str, Any], bad: Mapping[str, Any], paths: Iterable[Path], valid: Callable[[Mapping[str, Any]], bool]
) -> list[SettingChange]:
    """Return the changes that make the bad spec of the good one. paths: keys that differ. valid: check of a spec."""

    def change(group: Iterable[Path]) -> SettingChange:
        ordered = tuple(sorted(group))
        return SettingChange(
            ordered, tuple(lookup(good, path) for path in ordered), tuple(lookup(bad, path) for path in ordered)
        )

    stated = [path for path in paths if lookup(good, path) != lookup(bad, path)]
    groups: list[set[Path]] = [{path} for path in stated]
    depth = max(map(len, stated), default=0)
    while depth > 1:  # widen invalid groups to their section, from the deepest one
        depth -= 1
        for group in [group for group in groups if not valid(applied(good, [change(group)]))]:
            section = min(group)[:depth]
            if len(min(group)) <= depth or group not in groups:
                continue
            joined = [other for other in groups if any(path[:depth] == section for path in other)]
            groups = [other for other in groups if other not in joined] + [set().union(*joined)]
    coupled = [group for group in groups if not valid(applied(good, [change(group)]))]
    if coupled:
        groups = [group for group in groups if group not in coupled] + [set().union(*coupled)]
        if len(groups) > 1 and not valid(applied(good, [change(groups[-1])])):
            groups = [set().union(*groups)]
    return sorted(map(change, groups), key=lambda item: item.key)


T = TypeVar("T")

FEW = 4
"""Maximum number of changes that are tested one at a time from the start."""


def minimal_changes(changes: Sequence[T], reproduces: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a minimal subset of changes that reproduces the difference, in the given order. changes: a set that
    reproduces it. reproduces: test of a subset; not called for all changes, nor twice for the same subset.

    ddmin of Zeller and Hildebrandt 2002 (IEEE Transactions on Software Engineering 28(2):183, figure 6): test subsets
    of the changes, then their complements, then divide more finely. Few changes are tested one at a time, in their
    order; many are split in two first. Without any of the changes of the result the difference is not reproduced."""
    outcomes: dict[tuple[int, ...], bool] = {tuple(range(len(changes))): True}

    def fails(indices: tuple[int, ...]) -> bool:
        if indices not in outcomes:
            outcomes[indices] = reproduces([changes[index] for index in indices])
        return outcomes[indices]

    current = tuple(range(len(changes)))
    parts = _first_granularity(current)
    while len(current) > 1:
        subsets = _split(current, parts)
        if (subset := next((subset for subset in subsets if fails(subset)), None)) is not None:
            current, parts = subset, _first_granularity(subset)
            continue
        complements = [tuple(index for index in current if index not in subset) for subset in subsets]
        if parts > 2 and (smaller := next((part for part in complements if fails(part)), None)) is not None:
            current, parts = smaller, max(parts - 1, 2)
        elif parts < len(current):
            parts = min(len(current), 2 * parts)
        else:
            break
    return [changes[index] for index in current]


def _first_granularity(indices: Sequence[int]) -> int:
    return len(indices) if len(indices) <= FEW else 2


def _split(indices: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Return the indices in this number of parts of similar size."""
    ends = [len(indices) * part // parts for part in range(parts + 1)]
    return [indices[start:end] for start, end in itertools.pairwise(ends)]
