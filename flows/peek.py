"""A look at a store that changes nothing: what is damaged stays where it is, nothing is locked, fetched or written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from components.artifacts import MANIFEST, Artifact, Store, parse_manifest, read_artifact
from components.errors import ArtifactDamaged


class Peek:
    """Looks at the artifacts of one store."""

    def __init__(self, store: Store):
        self._store = store
        self.known: dict[str, Artifact] = {}
        """What was found so far, by key."""
        self._manifests: dict[str, dict[str, Any] | None] = {}

    def find(self, key: str, *, verify: bool = False) -> Artifact | None:
        """The artifact of a key, None where neither the folder nor the remote store behind it has it, or where it is
        damaged as far as that is looked at: with `verify` the files in the folder are hashed."""
        path, remote = self._store.path(key), self._store.remote
        try:
            if path.is_dir() or remote is None:
                artifact = read_artifact(path, verify=verify)
            elif (text := remote.manifest(key)) is not None:
                artifact, _ = parse_manifest(text, path, f"{remote.uri}/{key}")
            else:
                return None
        except ArtifactDamaged:
            return None
        self.known[key] = artifact
        return artifact

    def manifest(self, key: str) -> dict[str, Any] | None:
        """The manifest of an artifact in the folder, None where it is not there."""
        if key not in self._manifests:
            try:
                found = json.loads((self._store.path(key) / MANIFEST).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                found = None
            self._manifests[key] = found if isinstance(found, dict) and {"spec", "seconds"} <= set(found) else None
        return self._manifests[key]

    def keys(self) -> Iterator[str]:
        """Keys of all artifacts in the folder."""
        for artifact in self._store.manifests():
            yield artifact.key


def targets(spec: Mapping[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """The targets in a part of a spec, by path: `{"reward": {"_target_": ..., ...}}`. Those inside of another one count
    as its arguments."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping):
            below = f"{path}.{name}" if path else name
            found |= {below: dict(value)} if "_target_" in value else targets(value, below)
    return found
