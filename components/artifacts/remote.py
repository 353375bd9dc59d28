"""A store that several machines share: any filesystem that fsspec opens, such as s3://BUCKET/PREFIX.

    URI/<key>/                 the files, then manifest.json: an artifact is there when its manifest is
    URI/<key>.damaged-N/       the manifest of what no longer matched it
    URI/.locks/<key>           who works on the key now
    URI/.id                    a name that it got at its first use: an emptied store is another one

Nothing is used that was not verified: whoever downloads an artifact checks every file against the manifest. Uploads
write the manifest last and never over another one, so an upload that was killed at any moment left no artifact; the
next one writes the same names again.
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

from components.artifacts.files import RemoteFiles
from components.artifacts.folders import Folder
from components.artifacts.leases import lease
from components.artifacts.manifest import MANIFEST, Artifact, matches, parse_manifest
from components.artifacts.times import Times
from components.artifacts.uri import store_uri
from components.errors import ArtifactDamaged, Problem, ResourceError, SpecError
from components.redaction import mask_text

logger = logging.getLogger(__name__)

ID = ".id"


class Remote:
    """Artifacts below a URI. Making it raises SpecError for what is no address; everything else raises ResourceError
    where the store cannot be used."""

    def __init__(self, uri: str, times: Times):
        try:
            self.uri = store_uri(uri)
        except ValueError as error:
            raise SpecError([Problem("store", f"{mask_text(uri)!r}: expected {error}")]) from None
        self._times = times
        self._files = RemoteFiles(self.uri, times.patience)
        self._id = ""

    def check(self) -> None:
        """Reads and writes a little there, once. Raises ResourceError that says what to do."""
        files = self._files.impatient()
        name = f".checks/{uuid.uuid4().hex}"
        files.read(name)
        files.create(name, b"first")
        if files.create(name, b"second"):
            logger.warning("store: %s overwrites what it should not: two machines may do the same work there", self.uri)
        if files.read(name) not in (b"first", b"second"):
            raise ResourceError(f"store: {self.uri} does not give back what was just written there")
        files.delete(name)

    def id(self) -> str:
        """Tells this store from any other, also from an earlier one at the same URI."""
        while not self._id:
            text = self._files.read(ID)
            if text:
                self._id = hashlib.sha256(text).hexdigest()[:16]
            else:
                self._files.create(ID, uuid.uuid4().hex.encode())
        return self._id

    def manifest(self, key: str) -> bytes | None:
        """The manifest of an artifact as it stands there; None where there is none."""
        return self._files.read(f"{key}/{MANIFEST}")

    def download(self, key: str, text: bytes, folder: Path) -> None:
        """Fetches the artifact with this manifest into a folder. Raises ArtifactDamaged, naming the object, where one
        does not match, and ArtifactError for an artifact of a newer Espalier."""
        where = f"{self.uri}/{key}"
        artifact, files = parse_manifest(text, folder, where)
        if artifact.key != key:
            raise ArtifactDamaged(f"{where}/{MANIFEST} belongs to the key {artifact.key}")
        with (
            Folder(folder) as target,
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as arriving,
        ):
            for name, entry in files.items():
                self._download_file(key, name, entry, Path(arriving) / "file", target)
        (folder / MANIFEST).write_bytes(text)

    def _download_file(self, key: str, name: str, entry: Mapping[str, Any], arriving: Path, target: Folder) -> None:
        """Fetch one file. It arrives under a name of ours; the manifest's name is only used relative to the open
        folder."""
        where = f"{self.uri}/{key}/{name}"
        for last in (False, True):  # once more: what came wrong may have been broken on its way
            try:
                if self._files.size(f"{key}/{name}") != entry["bytes"]:  # not to fill the disk with what is refused
                    raise ArtifactDamaged(f"{where} does not match its manifest")
                self._files.download(f"{key}/{name}", arriving)
            except FileNotFoundError:
                raise ArtifactDamaged(f"{where} is missing") from None
            with Folder(arriving.parent) as folder:
                intact = matches(folder, arriving.name, entry)
            if intact:
                target.take(arriving, name)
                return
            if last:
                raise ArtifactDamaged(f"{where} does not match its manifest")

    def upload(self, artifact: Artifact) -> None:
        """Copies the artifact there, unless it is there. One that is there with another content stays."""
        key = artifact.key
        text = (artifact.path / MANIFEST).read_bytes()
        if (theirs := self.manifest(key)) is not None and self._keep(artifact, theirs):
            return
        for name in parse_manifest(text, artifact.path, str(artifact.path))[1]:
            self._files.upload(f"{key}/{name}", artifact.path / name)
        if not self._files.create(f"{key}/{MANIFEST}", text):
            logger.warning("%s: another machine has committed %s %s too", self.uri, artifact.kind, key[:12])

    def set_aside(self, key: str, text: bytes, error: ArtifactDamaged) -> None:
        """Takes the manifest with this text out of the way, so that the artifact counts as missing."""
        name = f"{key}/{MANIFEST}"
        if self._files.read(name) != text:  # somebody has replaced it since it was read
            return
        number = 1
        while not self._files.create(f"{key}.damaged-{number}/{MANIFEST}", text):
            number += 1
        self._files.delete(name)
        logger.warning("damaged artifact set aside as %s.damaged-%d and made again: %s", key, number, error)

    def lock(
        self, key: str, what: str, owner: str, timeout: float, on_wait: Callable[[str], None] | None
    ) -> AbstractContextManager[None]:
        """Holds the key against other machines; see `lease`."""
        return lease(self._files, f".locks/{key}", what, owner, timeout, on_wait, self._times)

    def _keep(self, artifact: Artifact, theirs: bytes) -> bool:
        """Whether the manifest that is there can stay."""
        try:
            other, _ = parse_manifest(theirs, artifact.path, f"{self.uri}/{artifact.key}")
        except ArtifactDamaged as error:
            self.set_aside(artifact.key, theirs, error)
            return False
        if other.digest != artifact.digest:
            logger.warning(
                "%s has another result for %s %s, made elsewhere; this machine goes on with its own",
                *(self.uri, artifact.kind, artifact.key[:12]),
            )
        return True
