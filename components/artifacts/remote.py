"""Artifact store shared by several machines: any filesystem that fsspec opens, such as s3://BUCKET/PREFIX.

    URI/<key>/                 the files, then manifest.json: an artifact exists once its manifest does
    URI/<key>.damaged-N/       manifest of an artifact that no longer matched it
    URI/.locks/<key>           lock of the machine that works on the key
    URI/.id                    random id, written at first use: an emptied store gets a new one

Only verified data is used: a download checks every file against the manifest. An upload writes the manifest last and
never replaces one, so an upload killed at any moment leaves no artifact; the next one writes the same names again.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from components.artifacts.files import RemoteFiles, store_uri
from components.artifacts.folders import Folder
from components.artifacts.leases import lease
from components.artifacts.manifest import MANIFEST, Artifact, matches, parse_manifest
from components.artifacts.times import Times
from components.errors import ArtifactDamaged, Problem, ResourceError, SpecError
from components.redaction import mask_text

logger = logging.getLogger(__name__)

ID = ".id"


class Remote:
    """Artifacts below a URI. The constructor raises SpecError for an invalid address; every method raises ResourceError
    if the store cannot be used."""

    def __init__(self, uri: str, times: Times):
        try:
            self.uri = store_uri(uri)
        except ValueError as error:
            raise SpecError([Problem("store", f"{mask_text(uri)!r}: expected {error}")]) from None
        self._times = times
        self._files = RemoteFiles(self.uri, times.patience)
        self._id = ""

    def check(self) -> None:
        """Write, read and delete a small object. Raise ResourceError, which says what to do, if that fails."""
        files = self._files.without_retry()
        name = f".checks/{uuid.uuid4().hex}"
        files.read(name)
        files.create(name, b"first")
        if files.create(name, b"second"):
            logger.warning("store: %s ignores conditional writes: two machines may do the same work", self.uri)
        if files.read(name) not in (b"first", b"second"):
            raise ResourceError(f"store: {self.uri} does not return what was just written to it")
        files.delete(name)

    def id(self) -> str:
        """Return the id of this store, which differs from that of an earlier store at the same URI."""
        while not self._id:
            text = self._files.read(ID)
            if text:
                self._id = hashlib.sha256(text).hexdigest()[:16]
            else:
                self._files.create(ID, uuid.uuid4().hex.encode())
        return self._id

    def manifest(self, key: str) -> bytes | None:
        """Return the manifest of an artifact as stored; None if there is none."""
        return self._files.read(f"{key}/{MANIFEST}")

    def download(self, key: str, text: bytes, folder: Path) -> None:
        """Fetch the artifact with this manifest into a folder. Raise ArtifactDamaged, naming the object, on a mismatch,
        and ArtifactError for an artifact of a newer Espalier."""
        where = f"{self.uri}/{key}"
        artifact, files = parse_manifest(text, folder, where)
        if artifact.key != key:
            raise ArtifactDamaged(f"{where}/{MANIFEST} belongs to the key {artifact.key}")
        with (
            Folder(folder) as target,
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as temporary,
        ):
            for name, entry in files.items():
                self._download_file(key, name, entry, Path(temporary) / "file", target)
        (folder / MANIFEST).write_bytes(text)

    def _download_file(self, key: str, name: str, entry: Mapping[str, Any], downloaded: Path, target: Folder) -> None:
        """Fetch one file, first under a name of our own. The manifest's name is only used relative to the open
        folder."""
        where = f"{self.uri}/{key}/{name}"
        for last in (False, True):  # retried once: the first transfer may have been corrupted
            try:
                if self._files.size(f"{key}/{name}") != entry["bytes"]:  # before the download, to save disk space
                    raise ArtifactDamaged(f"{where} does not match its manifest")
                self._files.download(f"{key}/{name}", downloaded)
            except FileNotFoundError:
                raise ArtifactDamaged(f"{where} is missing") from None
            with Folder(downloaded.parent) as folder:
                intact = matches(folder, downloaded.name, entry)
            if intact:
                target.take(downloaded, name)
                return
            if last:
                raise ArtifactDamaged(f"{where} does not match its manifest")

    def upload(self, artifact: Artifact) -> None:
        """Upload the artifact unless the store has it. An existing one with other content stays."""
        key = artifact.key
        text = (artifact.path / MANIFEST).read_bytes()
        if (manifest := self.manifest(key)) is not None and self._can_stay(artifact, manifest):
            return
        for name in parse_manifest(text, artifact.path, str(artifact.path))[1]:
            self._files.upload(f"{key}/{name}", artifact.path / name)
        if not self._files.create(f"{key}/{MANIFEST}", text):
            logger.warning("%s: another machine committed %s %s at the same time", self.uri, artifact.kind, key[:12])

    def set_aside(self, key: str, text: bytes, error: ArtifactDamaged) -> None:
        """Rename the manifest with this text, so that the artifact counts as missing."""
        name = f"{key}/{MANIFEST}"
        if self._files.read(name) != text:  # it was replaced since it was read
            return
        number = 1
        while not self._files.create(f"{key}.damaged-{number}/{MANIFEST}", text):
            number += 1
        self._files.delete(name)
        logger.warning("damaged artifact renamed to %s.damaged-%d, will be recomputed: %s", key, number, error)

    def lock(
        self, key: str, resource: str, owner: str, timeout: float, on_wait: Callable[[str], None] | None
    ) -> AbstractContextManager[None]:
        """Lock the key against other machines; see `lease`."""
        return lease(self._files, f".locks/{key}", resource, owner, timeout, on_wait, self._times)

    def _can_stay(self, artifact: Artifact, manifest: bytes) -> bool:
        """Return True if the existing manifest can stay."""
        try:
            other, _ = parse_manifest(manifest, artifact.path, f"{self.uri}/{artifact.key}")
        except ArtifactDamaged as error:
            self.set_aside(artifact.key, manifest, error)
            return False
        if other.digest != artifact.digest:
            logger.warning(
                "%s has another result for %s %s, computed elsewhere; this machine continues with its own",
                *(self.uri, artifact.kind, artifact.key[:12]),
            )
        return True
