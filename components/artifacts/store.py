"""The artifact store: the one truth about what is done.

An artifact is a folder of files with a `manifest.json`. It is found by its stage key, a digest of everything that
determines it, and it appears all at once or not at all: a draft is written aside, every file is hashed and synced,
then one rename puts the folder in its place. A process killed at any moment leaves at most an orphaned draft, which
the next one to work on that key removes.

    ROOT/<key>/                manifest.json and the files
    ROOT/<key>.damaged-N/      what no longer matched its manifest; kept for inspection, never used
    ROOT/.drafts/<key>.*/      being written
    ROOT/.downloads/<key>.*/   being fetched from the remote store
    ROOT/.scratch/<key>/       what an unfinished stage may go on from; removed by commit
    ROOT/.locks/<key>          who works on the key now
    ROOT/.remote/<id>/<key>    an empty file: the remote store with this id is known to have this one

Keys hold no run id, no absolute path and no key order, so equal work in any run, sweep or process is one artifact.
Two processes that want the same one wait for each other.

A store may have a remote one behind it (`components.artifacts.remote`), which several machines share. The folder is
then the working copy: what is not in it is fetched, what is made is uploaded. Stages read and write the folder only.

A file may be declared volatile: wall-clock times, logs. It is stored and verified like the others, but the
artifact's `digest`, on which later keys are built, does not cover it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.artifacts.locks import lock_file
from components.artifacts.manifest import (
    MANIFEST,
    MANIFEST_VERSION,
    Artifact,
    content_digest,
    describe,
    read_artifact,
)
from components.artifacts.names import is_key
from components.artifacts.remote import Remote
from components.artifacts.times import Times
from components.errors import ArtifactDamaged, ArtifactError, Problem, SpecError

logger = logging.getLogger(__name__)

TRANSFER = 6 * 3600.0
"""Seconds to wait for another process of this machine that fetches or uploads the same artifact."""


@dataclass
class Draft:
    """An artifact that is being written."""

    path: Path
    """Folder to write into."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Goes into the manifest; not covered by the digest."""


class Store:
    """Artifacts below one local folder, with a remote store behind it if `remote` gives its URI. Safe to use from
    several threads and processes; with a remote store, from several machines.

    Whatever needs the remote store raises ResourceError where it cannot be used, after `times.patience` seconds of
    trying where that may help.
    """

    def __init__(self, root: str | Path, remote: str | None = None, times: Times = Times()):  # noqa: B008  frozen
        if "://" in str(root):
            message = f"'{root}' is a URI; stages work in a local folder: give a path, and the URI as store=URI"
            raise SpecError([Problem("root", message)])
        self.root = Path(root).absolute()
        self.remote = None if remote is None else Remote(remote, times)
        self._verified: dict[str, Artifact] = {}
        self._holders: dict[str, int] = {}
        self._shared: set[str] = set()

    def __str__(self) -> str:
        return f"{self.root} and {self.remote.uri}" if self.remote is not None else str(self.root)

    def check(self) -> None:
        """Raises ResourceError, within a minute or two, where the remote store cannot be read and written."""
        if self.remote is not None:
            self.remote.check()

    def path(self, key: str) -> Path:
        """Where the artifact of `key` lies, or would lie. Raises ArtifactError for what is no key."""
        return self.root / _checked(key)

    def find(self, key: str) -> Artifact | None:
        """The artifact of `key`, or None where there is none.

        The sha256 of every file is checked the first time this store meets the artifact. A damaged one is set aside
        and logged by name; then it counts as missing. What only the remote store has is fetched; what only the folder
        has, because an upload failed, is uploaded. Raises ArtifactError for an artifact of a newer Espalier.
        """
        artifact = self._find_here(key)
        if self.remote is None:
            return artifact
        if artifact is None:
            return self._fetch(key, self.remote)
        self._share(artifact, self.remote)
        return artifact

    def manifests(self) -> Iterator[Artifact]:
        """Every artifact in the folder, in no order; files are not verified. What cannot be read is left out and
        logged."""
        for path in self.root.glob(f"[!.]*/{MANIFEST}"):
            if ".damaged-" in path.parent.name:
                continue
            try:
                yield read_artifact(path.parent, verify=False)
            except ArtifactError as error:
                logger.warning("left out: %s", error)

    def made_from(self, artifact: Artifact) -> list[Artifact]:
        """The artifacts in the folder that have this one as an input: lineage downwards. Upwards it is
        `artifact.inputs`."""
        return [other for other in self.manifests() if artifact.key in other.inputs.values()]

    @contextlib.contextmanager
    def lock(self, key: str, timeout: float, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Holds the key against other threads and processes, and other machines where there is a remote store.

        `on_wait` is told whom we wait for. Raises WaitTimeout, which says the same, after `timeout` seconds.
        """
        start = time.monotonic()
        what = f"artifact {_checked(key)[:12]}"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._flock(key, what, timeout, on_wait))
            if self.remote is not None:  # second, so that of each machine only one process asks there
                left = max(timeout - (time.monotonic() - start), 0)
                stack.enter_context(self.remote.lock(key, what, self._owner(), left, on_wait))
            self._holders[key] = threading.get_ident()
            try:
                yield
            finally:
                del self._holders[key]

    def scratch(self, key: str) -> Path:
        """A folder for the unfinished work of a stage. It survives the stage's death; commit removes it."""
        path = self.root / ".scratch" / _checked(key)
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def draft(
        self,
        key: str,
        *,
        stage: str,
        kind: str,
        schema_version: int,
        inputs: Mapping[str, Artifact],
        volatile: Sequence[str] = (),
        spec: Mapping[str, Any] | None = None,
        lock_timeout: float = 60.0,
    ) -> Iterator[Draft]:
        """A new artifact: write into `draft.path`; a clean exit commits it, an exception leaves nothing.

        `inputs` names the artifacts it was made from. `volatile` lists files, relative to the folder, that the digest
        shall not cover. `spec` is stored for the reader of the manifest. The key is locked meanwhile; a lock that
        this thread holds already is used. Where the artifact exists already, it stays and the draft is dropped.

        With a remote store it is committed here first and then uploaded. An upload that fails raises ResourceError;
        the artifact stays here, and the next `find` uploads it.
        """
        with contextlib.ExitStack() as stack:
            if self._holders.get(key) != threading.get_ident():
                stack.enter_context(self.lock(key, lock_timeout))
            drafts = self.root / ".drafts"
            for orphan in drafts.glob(f"{key}.*"):  # we hold the lock, so whoever wrote it is dead
                shutil.rmtree(orphan)
            start = time.monotonic()
            with self._folder(drafts, key) as path:
                draft = Draft(path)
                yield draft
                files = describe(path)
                manifest = {
                    "manifest_version": MANIFEST_VERSION,
                    "kind": kind,
                    "schema_version": schema_version,
                    "stage": stage,
                    "key": key,
                    "digest": content_digest(files, volatile),
                    "seconds": round(time.monotonic() - start, 3),
                    "inputs": {name: {"key": a.key, "digest": a.digest} for name, a in sorted(inputs.items())},
                    "metrics": draft.metrics,
                    "files": files,
                    "volatile": sorted(volatile),
                    "spec": spec,
                }
                text = json.dumps(manifest, indent=2, ensure_ascii=False)
                (path / MANIFEST).write_text(text + "\n", encoding="utf-8")
                artifact = self._find_here(key) or self._place(path, key)
            shutil.rmtree(self.root / ".scratch" / key, ignore_errors=True)
            if self.remote is not None:
                self._share(artifact, self.remote)

    def _find_here(self, key: str) -> Artifact | None:
        path = self.path(key)
        known = self._verified.get(key)
        if known is not None and (path / MANIFEST).is_file():
            return known
        try:
            inode = path.lstat().st_ino
        except FileNotFoundError:
            return None
        try:
            artifact = read_artifact(path)
            if artifact.key != key:
                raise ArtifactDamaged(f"{path / MANIFEST} belongs to the key {artifact.key}")
        except ArtifactDamaged as error:
            self._set_aside(key, inode, error)
            return None
        self._verified[key] = artifact
        return artifact

    def _fetch(self, key: str, remote: Remote) -> Artifact | None:
        """Downloads the artifact if the remote store has it intact."""
        text = remote.manifest(key)
        if text is None:
            return None
        with self._transfer(key):
            if (artifact := self._find_here(key)) is not None:  # another process has fetched it meanwhile
                return artifact
            downloads = self.root / ".downloads"
            for orphan in downloads.glob(f"{key}.*"):
                shutil.rmtree(orphan)
            with self._folder(downloads, key) as path:
                try:
                    remote.download(key, text, path)
                except ArtifactDamaged as error:
                    remote.set_aside(key, text, error)
                    return None
                artifact = self._place(path, key)
            self._mark(key, remote)
            logger.info("%s %s fetched from %s", artifact.kind, key[:12], remote.uri)
        return artifact

    def _share(self, artifact: Artifact, remote: Remote) -> None:
        """Makes sure that the remote store has the artifact."""
        if artifact.key in self._shared:
            return
        marker = self._marker(artifact.key, remote)
        if marker.exists():
            self._shared.add(artifact.key)
            return
        with self._transfer(artifact.key):
            if not marker.exists():
                remote.upload(artifact)
                self._mark(artifact.key, remote)

    def _marker(self, key: str, remote: Remote) -> Path:
        return self.root / ".remote" / remote.id() / key

    def _mark(self, key: str, remote: Remote) -> None:
        marker = self._marker(key, remote)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        self._shared.add(key)

    def _transfer(self, key: str) -> contextlib.AbstractContextManager[None]:
        """One process of this machine at a time fetches or uploads an artifact."""
        return self._flock(f"{key}.transfer", f"artifact {key[:12]} on its way", TRANSFER, logger.info)

    @contextlib.contextmanager
    def _flock(self, name: str, what: str, timeout: float, on_wait: Callable[[str], None] | None) -> Iterator[None]:
        path = self.root / ".locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+") as file:
            lock_file(file, what, timeout, on_wait)
            yield

    def _owner(self) -> str:
        """This folder on this machine since it was started. Whoever held a remote lock under this name and is not us
        has died, for the local lock is ours."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""
        status = self.root.stat()
        return f"{boot} {status.st_dev} {status.st_ino}"

    @contextlib.contextmanager
    def _folder(self, parent: Path, key: str) -> Iterator[Path]:
        """A folder to fill, which is gone afterwards unless it was put in its place."""
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=parent, prefix=f"{key}."))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _place(self, folder: Path, key: str) -> Artifact:
        """Puts a complete folder in its place; where another process was first, its folder stays."""
        path = self.path(key)
        folder.chmod(0o755)  # mkdtemp made it private
        for inner in folder.rglob("*"):  # nobody else may change what was verified, whatever the umask is
            inner.chmod(inner.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        sync_tree(folder)
        try:
            os.rename(folder, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync(self.root)
        self._verified[key] = read_artifact(path, verify=False)  # hashed a moment ago
        return self._verified[key]

    def _set_aside(self, key: str, inode: int, error: ArtifactDamaged) -> None:
        path = self.path(key)
        number = 1
        while os.path.lexists(aside := path.with_name(f"{key}.damaged-{number}")):
            number += 1
        try:
            if path.lstat().st_ino == inode:  # nobody has replaced it since it was read
                os.rename(path, aside)
        except FileNotFoundError:
            return
        self._verified.pop(key, None)
        logger.warning("damaged artifact set aside as %s and made again: %s", aside.name, error)


def _checked(key: str) -> str:
    """Return a key that is to be used in a path. Raise ArtifactError for anything that is none."""
    if not is_key(key):
        raise ArtifactError(f"{key!a} is no key of an artifact; expected letters, digits, - and _")
    return key


def sync_tree(folder: Path) -> None:
    """Has the operating system write a folder and all in it to the disk."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
