"""Read-only access to a store: damaged artifacts stay in place, and nothing is locked or written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from components.artifacts import MANIFEST, Artifact, Store, Times, parse_manifest, read_artifact
from components.errors import ArtifactDamaged, ArtifactError, ResourceError
from components.json_text import parse_json

PATIENCE = 5.0
"""Seconds for which requests to a remote store are retried by read-only commands."""


class StoreReader:
    """Read-only view of the artifacts of one store. With `through`, it also reads manifests and files from the remote
    store; an unreachable remote store counts as empty, and `unread` contains the error."""

    def __init__(self, store: Store, *, through: bool = False):
        self._store = store
        self._through = through
        self._texts: dict[str, bytes | None] = {}
        self.unread = ""
        self.known: dict[str, Artifact] = {}
        """Artifacts found so far, by key."""
        self._manifests: dict[str, dict[str, Any] | None] = {}

    def find(self, key: str, *, verify: bool = False) -> Artifact | None:
        """Return the artifact of a key; None if neither the folder nor the remote store has it, or if it is damaged.
        verify: also check the hashes of the files in the folder."""
        path, remote = self._store.path(key), self._store.remote
        try:
            if path.is_dir() or remote is None:
                artifact = read_artifact(path, verify=verify)
            elif (text := self._remote_manifest(key)) is not None:
                artifact, _ = parse_manifest(text, path, f"{remote.uri}/{key}")
            else:
                return None
        except ArtifactDamaged:
            return None
        self.known[key] = artifact
        return artifact

    def holds(self, key: str) -> bool:
        """Return True if the folder has the artifact, so that its files remain after `opened`."""
        return self._store.path(key).is_dir()

    @contextmanager
    def opened(self, key: str) -> Iterator[Artifact | None]:
        """Provide the artifact of a key with verified files; None if it is missing or damaged. Files of the remote
        store are downloaded to a temporary folder."""
        remote, text = self._store.remote, None if self._store.path(key).is_dir() else self._remote_manifest(key)
        if remote is None or text is None:
            yield self.find(key, verify=True)
            return
        with TemporaryDirectory() as folder:
            try:
                remote.download(key, text, Path(folder))
                artifact = read_artifact(Path(folder), verify=False)
            except ArtifactDamaged:
                artifact = None
            except ResourceError as error:
                artifact, self.unread = None, str(error)
            yield artifact

    def _remote_manifest(self, key: str) -> bytes | None:
        """Return the text of an artifact's manifest in the remote store, else None."""
        remote = self._store.remote
        if remote is None or self.unread:
            return None
        if key not in self._texts:
            try:
                self._texts[key] = remote.manifest(key)
            except ResourceError as error:
                if not self._through:
                    raise
                self.unread = str(error)
        return self._texts.get(key)

    def manifest(self, key: str) -> dict[str, Any] | None:
        """Return the manifest of an artifact in the folder, or with `through` in the remote store; None if it does not
        exist or is damaged."""
        if key not in self._manifests:
            path = self._store.path(key)
            text = self._remote_manifest(key) if self._through and not path.is_dir() else None
            try:
                if text is None:
                    read_artifact(path, verify=False)
                    text = (path / MANIFEST).read_bytes()
                parse_manifest(text, path, key)
                self._manifests[key] = parse_json(text)
            except (OSError, ArtifactError):
                self._manifests[key] = None
        return self._manifests[key]

    def keys(self) -> Iterator[str]:
        """Yield the keys of all artifacts in the folder."""
        for artifact in self._store.manifests():
            yield artifact.key


def open_reader(root: Path, uri: str | None) -> StoreReader:
    """Return a view of the artifacts below a root, and for missing ones of the remote store at `uri`."""
    return StoreReader(Store(root / "artifacts", uri, Times(patience=PATIENCE)), through=True)


def targets(spec: Mapping[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """Return the targets in a part of a spec by path: `{"reward": {"_target_": ..., ...}}`. A target nested in another
    one counts as its argument."""
    result: dict[str, dict[str, Any]] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping):
            below = f"{path}.{name}" if path else name
            result |= {below: dict(value)} if "_target_" in value else targets(value, below)
    return result
