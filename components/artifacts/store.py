"""Content-addressed artifact store, the single source of truth about finished work.

An artifact is a folder of files with a `manifest.json`. It is looked up by its stage key, a digest of everything that
determines it. It is committed atomically: a draft is written to a temporary folder, every file is hashed and synced,
and one rename moves the folder to its place. A process killed at any moment leaves at most an orphaned draft, which the
next process that works on the key removes.

    ROOT/<key>/                manifest.json and the files
    ROOT/<key>.damaged-N/      artifact that did not match its manifest; kept for inspection, never used
    ROOT/.drafts/<key>.*/      being written
    ROOT/.downloads/<key>.*/   being fetched from the remote store
    ROOT/.scratch/<key>/       checkpoints of an unfinished stage; removed by commit
    ROOT/.locks/<key>          lock of the process that works on the key
    ROOT/.remote/<id>/<key>    empty marker: the remote store with this id has this artifact

Keys contain no run id, no absolute path and no key order, so equal work in any run, sweep or process is one artifact.
Two processes that need the same one wait for each other.

A store may be backed by a remote one (`components.artifacts.remote`) that several machines share. The local folder is
then a cache: missing artifacts are fetched, new ones are uploaded. Stages read and write the local folder only.

A file may be declared volatile: wall-clock times, logs. It is stored and verified like the others, but the artifact's
`digest`, from which later keys are derived, does not cover it.
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
"""Seconds to wait for another local process that fetches or uploads the same artifact."""


@dataclass
class Draft:
    """Artifact that is being written."""

    path: Path
    """Folder to write into."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics for the manifest; not covered by the digest."""
    code: str = ""
    """Digest of the code that computes it, for the manifest; not covered by the digest."""


class Store:
    """Artifacts below one local folder, backed by a remote store if `remote` gives its URI. Safe to use from several
    threads and processes; with a remote store, from several machines.

    Methods that need the remote store raise ResourceError if it cannot be used. Transient failures are retried for
    `times.patience` seconds.
    """

    def __init__(self, root: str | Path, remote: str | None = None, times: Times = Times()):  # noqa: B008  frozen
        if "://" in str(root):
            message = f"'{root}' is a URI, but stages work in a local folder; expected a path, and the URI as store=URI"
            raise SpecError([Problem("root", message)])
        self.root = Path(root).absolute()
        self.remote = None if remote is None else Remote(remote, times)
        self._verified: dict[str, Artifact] = {}
        self._holders: dict[str, int] = {}
        self._shared: set[str] = set()

    def __str__(self) -> str:
        return f"{self.root} and {self.remote.uri}" if self.remote is not None else str(self.root)

    def check(self) -> None:
        """Raise ResourceError, within a minute or two, if the remote store cannot be read and written."""
        if self.remote is not None:
            self.remote.check()

    def path(self, key: str) -> Path:
        """Return the folder of the artifact of `key`, which need not exist. Raise ArtifactError for an invalid key."""
        return self.root / _checked(key)

    def find(self, key: str) -> Artifact | None:
        """Return the artifact of `key`, or None.

        The first lookup verifies the sha256 of every file. A damaged artifact is renamed and logged; it then counts as
        missing. An artifact that only the remote store has is fetched; one that only the folder has, because an upload
        failed, is uploaded. Raises ArtifactError for an artifact of a newer Espalier.
        """
        artifact = self._find_here(key)
        if self.remote is None:
            return artifact
        if artifact is None:
            return self._fetch(key, self.remote)
        self._share(artifact, self.remote)
        return artifact

    def discard(self, key: str, reason: str) -> None:
        """Remove an artifact that is to be computed again; the remote store keeps its files under another name. The
        caller must not need it any more."""
        self._verified.pop(key, None)
        self._shared.discard(key)
        if self.remote is not None and (text := self.remote.manifest(key)) is not None:
            self.remote.set_aside(key, text, ArtifactDamaged(reason))
            self._marker(key, self.remote).unlink(missing_ok=True)
        trash = self.root / ".drafts" / f"{_checked(key)}.gone"
        shutil.rmtree(trash, ignore_errors=True)
        trash.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.path(key).rename(trash)  # atomic: a partially deleted artifact must not be visible
            shutil.rmtree(trash)

    def manifests(self) -> Iterator[Artifact]:
        """Yield every artifact in the folder, in no particular order and without verifying files. Unreadable ones are
        skipped and logged."""
        for path in self.root.glob(f"[!.]*/{MANIFEST}"):
            if ".damaged-" in path.parent.name:
                continue
            try:
                yield read_artifact(path.parent, verify=False)
            except ArtifactError as error:
                logger.warning("skipped unreadable artifact: %s", error)

    def made_from(self, artifact: Artifact) -> list[Artifact]:
        """Return the artifacts in the folder that have this one as an input (downstream lineage). `artifact.inputs` is
        the upstream lineage."""
        return [other for other in self.manifests() if artifact.key in other.inputs.values()]

    @contextlib.contextmanager
    def lock(self, key: str, timeout: float, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Lock the key against other threads and processes, and other machines if there is a remote store.

        `on_wait` is called with a message that names the holder. Raises WaitTimeout after `timeout` seconds.
        """
        start = time.monotonic()
        resource = f"artifact {_checked(key)[:12]}"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._flock(key, resource, timeout, on_wait))
            if self.remote is not None:  # after the local lock, so that one process per machine contends for it
                remaining = max(timeout - (time.monotonic() - start), 0)
                stack.enter_context(self.remote.lock(key, resource, self._owner(), remaining, on_wait))
            self._holders[key] = threading.get_ident()
            try:
                yield
            finally:
                del self._holders[key]

    def scratch(self, key: str) -> Path:
        """Return a folder for checkpoints of an unfinished stage. It survives the stage's death; commit removes it.

        Its contents are as untrusted as an artifact. What no stage leaves there is removed with a warning: links, pipes
        and other special files, and folders with a file's suffix. Readers check the files."""
        path = self.root / ".scratch" / _checked(key)
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            _remove_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        for entry in path.iterdir():
            if entry.is_symlink() or not (entry.is_file() or (entry.is_dir() and not entry.suffix)):
                _remove_foreign(entry)
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
        """Create an artifact: write into `draft.path`; a clean exit commits it, an exception discards it.

        `inputs` names the artifacts it is computed from. `volatile` lists files, relative to the folder, that the
        digest does not cover. `spec` is stored for readers of the manifest. The key is locked meanwhile; a lock that
        this thread already holds is reused. If the artifact exists already, it stays and the draft is discarded.

        With a remote store it is committed locally first and then uploaded. A failed upload raises ResourceError; the
        artifact stays in the folder, and the next `find` uploads it.
        """
        with contextlib.ExitStack() as stack:
            if self._holders.get(key) != threading.get_ident():
                stack.enter_context(self.lock(key, lock_timeout))
            drafts = self.root / ".drafts"
            for orphan in drafts.glob(f"{key}.*"):  # we hold the lock, so their writer is dead
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
                    **({"code": draft.code} if draft.code else {}),
                }
                text = json.dumps(manifest, indent=2, ensure_ascii=False)
                (path / MANIFEST).write_text(text + "\n", encoding="utf-8")
                artifact = self._find_here(key) or self._place(path, key)
            shutil.rmtree(self.root / ".scratch" / key, ignore_errors=True)
            if self.remote is not None:
                self._share(artifact, self.remote)

    def _find_here(self, key: str) -> Artifact | None:
        path = self.path(key)
        verified = self._verified.get(key)
        if verified is not None and (path / MANIFEST).is_file():
            return verified
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
        """Download the artifact if the remote store has it intact."""
        text = remote.manifest(key)
        if text is None:
            return None
        with self._transfer(key):
            if (artifact := self._find_here(key)) is not None:  # another process fetched it in the meantime
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
        """Upload the artifact unless the remote store has it."""
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
        """Lock an artifact so that one local process at a time fetches or uploads it."""
        return self._flock(f"{key}.transfer", f"the transfer of artifact {key[:12]}", TRANSFER, logger.info)

    @contextlib.contextmanager
    def _flock(self, name: str, resource: str, timeout: float, on_wait: Callable[[str], None] | None) -> Iterator[None]:
        path = self.root / ".locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+") as file:
            lock_file(file, resource, timeout, on_wait)
            yield

    def _owner(self) -> str:
        """Return an id of this folder and this boot of the machine. We hold the local lock, so any other process that
        holds a remote lock with this owner has died."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""
        status = self.root.stat()
        return f"{boot} {status.st_dev} {status.st_ino}"

    @contextlib.contextmanager
    def _folder(self, parent: Path, key: str) -> Iterator[Path]:
        """Yield a temporary folder, which is removed afterwards unless it was moved to its place."""
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=parent, prefix=f"{key}."))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _place(self, folder: Path, key: str) -> Artifact:
        """Move a complete folder to its place; if another process was first, its folder stays."""
        path = self.path(key)
        folder.chmod(0o755)  # mkdtemp made it private
        for inner in folder.rglob("*"):  # no other user may change verified files, whatever the umask is
            inner.chmod(inner.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        sync_tree(folder)
        try:
            os.rename(folder, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync(self.root)
        self._verified[key] = read_artifact(path, verify=False)  # hashed when it was drafted
        return self._verified[key]

    def _set_aside(self, key: str, inode: int, error: ArtifactDamaged) -> None:
        path = self.path(key)
        number = 1
        while os.path.lexists(damaged := path.with_name(f"{key}.damaged-{number}")):
            number += 1
        try:
            if path.lstat().st_ino == inode:  # not replaced since it was read
                os.rename(path, damaged)
        except FileNotFoundError:
            return
        self._verified.pop(key, None)
        logger.warning("damaged artifact renamed to %s, will be recomputed: %s", damaged.name, error)


def _checked(key: str) -> str:
    """Return a key for use in a path. Raise ArtifactError for an invalid key."""
    if not is_key(key):
        raise ArtifactError(f"{key!a} is not an artifact key; expected letters, digits, - and _")
    return key


def _remove_foreign(path: Path) -> None:
    """Remove an entry of a scratch folder that no stage writes; never what a link points to."""
    logger.warning("%s is none of the files that a stage leaves there; it is removed", path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_tree(folder: Path) -> None:
    """Sync a folder and everything in it to disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
