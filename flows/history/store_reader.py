"""A look at a store that changes nothing: what is damaged stays where it is, nothing is locked or written there."""

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
"""Seconds for which a remote store that fails is tried again, where a command only looks."""


class Peek:
    """Looks at the artifacts of one store. With `through`, also manifests and files are read from the remote store
    behind it, and one that cannot be read counts as empty: `unread` says why."""

    def __init__(self, store: Store, *, through: bool = False):
        self._store = store
        self._through = through
        self._texts: dict[str, bytes | None] = {}
        self.unread = ""
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
            elif (text := self._there(key)) is not None:
                artifact, _ = parse_manifest(text, path, f"{remote.uri}/{key}")
            else:
                return None
        except ArtifactDamaged:
            return None
        self.known[key] = artifact
        return artifact

    @contextmanager
    def opened(self, key: str) -> Iterator[Artifact | None]:
        """The artifact of a key with its files, verified; None where that cannot be had. Files of the remote store are
        fetched into a folder that is gone afterwards."""
        remote, text = self._store.remote, None if self._store.path(key).is_dir() else self._there(key)
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

    def _there(self, key: str) -> bytes | None:
        """The manifest of an artifact in the remote store."""
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
        """The manifest of an artifact in the folder (`through`: or behind it), None where it is not there."""
        if key not in self._manifests:
            path = self._store.path(key)
            text = self._there(key) if self._through and not path.is_dir() else None
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
        """Keys of all artifacts in the folder."""
        for artifact in self._store.manifests():
            yield artifact.key


def peek_through(root: Path, uri: str | None) -> Peek:
    """A look at the artifacts below a root and, for those that are not there, into the store of this URI."""
    return Peek(Store(root / "artifacts", uri, Times(patience=PATIENCE)), through=True)


def targets(spec: Mapping[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """The targets in a part of a spec, by path: `{"reward": {"_target_": ..., ...}}`. Those inside of another one count
    as its arguments."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping):
            below = f"{path}.{name}" if path else name
            found |= {below: dict(value)} if "_target_" in value else targets(value, below)
    return found
