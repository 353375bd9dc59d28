"""Database of an episode: the published tables, shared by all episodes, and the records that this episode changed.

Tables are never copied as a whole. A tool that changes a record edits its own copy of it, so the start of an episode
costs nothing, and two episodes are compared by the records that differ from the published ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

Record = dict[str, Any]
Tables = Mapping[str, Mapping[str, Record]]


class EpisodeDatabase:
    """A database that copies a record when it is edited.

    tables: the published tables, which are never changed.
    """

    def __init__(self, tables: Tables):
        self._tables = tables
        self._edited: dict[str, dict[str, Record]] = {name: {} for name in tables}

    def get(self, table: str, key: str) -> Record | None:
        """Return a record to read; None if there is none."""
        return self._edited[table].get(key) or self._tables[table].get(key)

    def edit(self, table: str, key: str) -> Record:
        """Return the episode's copy of a record, to change."""
        if key not in self._edited[table]:
            self._edited[table][key] = deepcopy(self._tables[table][key])
        return self._edited[table][key]

    def add(self, table: str, key: str, record: Record) -> None:
        """Add a record, or replace it."""
        self._edited[table][key] = record

    def records(self, table: str) -> Iterator[tuple[str, Record]]:
        """Yield the keys and records of a table in the published order, added ones last."""
        edited = self._edited[table]
        for key, record in self._tables[table].items():
            yield key, edited.get(key, record)
        for key, record in edited.items():
            if key not in self._tables[table]:
                yield key, record

    def changes(self) -> dict[str, dict[str, Record]]:
        """Return a copy of the records that differ from the published ones, by table and key."""
        return {
            name: {
                key: deepcopy(record)
                for key, record in edited.items()
                if canonical(record) != canonical(self._tables[name].get(key))
            }
            for name, edited in self._edited.items()
        }

    def restore(self, changes: Mapping[str, Mapping[str, Record]]) -> None:
        """Restore the changes of an episode with the same tables."""
        self._edited = {name: deepcopy(dict(changes.get(name, {}))) for name in self._tables}

    def digest(self) -> str:
        """Return the digest of the changes. Two databases with equal tables have equal digests if all records are
        equal."""
        return hashlib.sha256(canonical(self.changes()).encode()).hexdigest()

    def whole(self) -> dict[str, dict[str, Record]]:
        """Return all tables with the changes."""
        return {name: dict(self.records(name)) for name in self._tables}


def canonical(value: Any) -> str:
    """Return a text that is equal for equal JSON data, regardless of the order of keys."""
    return json.dumps(value, sort_keys=True)
