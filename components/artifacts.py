"""The artifact store: the one truth about what is done.

An artifact is a folder of files with a `manifest.json`. It is found by its stage key, a digest of everything that
determines it, and it appears all at once or not at all: a draft is written aside, every file is hashed and synced,
then one rename puts the folder in its place. A process killed at any moment leaves at most an orphaned draft, which
the next one to work on that key removes.

    ROOT/<key>/                manifest.json and the files
    ROOT/<key>.damaged-N/      what no longer matched its manifest; kept for inspection, never used
    ROOT/.drafts/<key>.*/      being written
    ROOT/.scratch/<key>/       what an unfinished stage may go on from; removed by commit
    ROOT/.locks/<key>          who works on the key now

Keys hold no run id, no absolute path and no key order, so equal work in any run, sweep or process is one artifact.
Two processes that want the same one wait for each other (`flock`: a lock dies with its holder).

A file may be declared volatile: wall-clock times, logs. It is stored and verified like the others, but the
artifact's `digest`, on which later keys are built, does not cover it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from components.errors import ArtifactDamaged, Problem, SpecError, WaitTimeout

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Artifact:
    """A finished artifact. Only a reference: the data stay in its folder."""

    key: str
    """Stage key under which it is found."""
    kind: str
    """What it holds: trajectories, scores, selection, checkpoint, evaluation or export."""
    stage: str
    """Stage that made it."""
    schema_version: int
    """Version of the layout of its files."""
    digest: str
    """sha256 over paths and sha256 of all files that are not volatile: equal content, equal digest."""
    path: Path
    metrics: dict[str, float]
    inputs: dict[str, str]
    """Name of each input and the key of its artifact."""
    volatile: tuple[str, ...]
    """Files that the digest does not cover."""
    seconds: float
    """Wall-clock time of the stage."""
    size: int = 0
    """Bytes of all files."""


@dataclass
class Draft:
    """An artifact that is being written."""

    path: Path
    """Folder to write into."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Goes into the manifest; not covered by the digest."""


def stage_key(stage: str, version: int, spec: Mapping[str, Any], inputs: Mapping[str, str], seed: int) -> str:
    """The key of a stage: sha256 (hex) over canonical JSON of its arguments.

    `spec` is the part that the stage reads, as JSON data; `inputs` maps names to content digests. The order of
    mappings does not matter. Raises TypeError for anything that is not JSON data, ValueError for NaN and infinity.
    """
    parts = {"stage": stage, "version": version, "spec": spec, "inputs": inputs, "seed": seed}
    return hashlib.sha256(_canonical(parts).encode()).hexdigest()


class Store:
    """Artifacts below one local folder. Safe to use from several threads and processes."""

    def __init__(self, root: str | Path):
        if "://" in str(root):
            message = f"'{root}' is a URI; artifacts are kept in a local folder: give a path"
            raise SpecError([Problem("root", message)])
        self.root = Path(root).absolute()
        self._verified: dict[str, Artifact] = {}
        self._holders: dict[str, int] = {}

    def path(self, key: str) -> Path:
        """Where the artifact of `key` lies, or would lie."""
        return self.root / key

    def find(self, key: str) -> Artifact | None:
        """The artifact of `key`, or None where there is none.

        The sha256 of every file is checked the first time this store meets the artifact. A damaged one is set aside
        and logged by name; then it counts as missing.
        """
        path = self.path(key)
        known = self._verified.get(key)
        if known is not None and (path / MANIFEST).is_file():
            return known
        try:
            inode = path.stat().st_ino
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

    @contextlib.contextmanager
    def lock(self, key: str, timeout: float, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Holds the key against other threads and processes.

        `on_wait` is told once whom we wait for. Raises WaitTimeout, which says the same, after `timeout` seconds.
        """
        path = self.root / ".locks" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+") as file:
            lock_file(file, f"artifact {key[:12]}", timeout, on_wait)
            self._holders[key] = threading.get_ident()
            try:
                yield
            finally:
                del self._holders[key]

    def scratch(self, key: str) -> Path:
        """A folder for the unfinished work of a stage. It survives the stage's death; commit removes it."""
        path = self.root / ".scratch" / key
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
        """
        with contextlib.ExitStack() as stack:
            if self._holders.get(key) != threading.get_ident():
                stack.enter_context(self.lock(key, lock_timeout))
            drafts = self.root / ".drafts"
            drafts.mkdir(parents=True, exist_ok=True)
            for orphan in drafts.glob(f"{key}.*"):  # we hold the lock, so whoever wrote it is dead
                shutil.rmtree(orphan)
            draft = Draft(Path(tempfile.mkdtemp(dir=drafts, prefix=f"{key}.")))
            start = time.monotonic()
            try:
                yield draft
                files = _describe(draft.path)
                manifest = {
                    "manifest_version": MANIFEST_VERSION,
                    "kind": kind,
                    "schema_version": schema_version,
                    "stage": stage,
                    "key": key,
                    "digest": _digest(files, volatile),
                    "seconds": round(time.monotonic() - start, 3),
                    "inputs": {name: {"key": a.key, "digest": a.digest} for name, a in sorted(inputs.items())},
                    "metrics": draft.metrics,
                    "files": files,
                    "volatile": sorted(volatile),
                    "spec": spec,
                }
                text = json.dumps(manifest, indent=2, ensure_ascii=False)
                (draft.path / MANIFEST).write_text(text + "\n", encoding="utf-8")
                _sync_tree(draft.path)
                draft.path.chmod(0o755)  # mkdtemp made it private
                if self.find(key) is None:
                    os.rename(draft.path, self.path(key))
                    _sync(self.root)
                    self._verified[key] = read_artifact(self.path(key), verify=False)  # hashed a moment ago
            finally:
                shutil.rmtree(draft.path, ignore_errors=True)
            shutil.rmtree(self.root / ".scratch" / key, ignore_errors=True)

    def _set_aside(self, key: str, inode: int, error: ArtifactDamaged) -> None:
        path = self.path(key)
        number = 1
        while (aside := path.with_name(f"{key}.damaged-{number}")).exists():
            number += 1
        try:
            if path.stat().st_ino == inode:  # nobody has replaced it since it was read
                os.rename(path, aside)
        except FileNotFoundError:
            return
        self._verified.pop(key, None)
        logger.warning("damaged artifact set aside as %s and made again: %s", aside.name, error)


def read_artifact(path: Path, *, verify: bool = True) -> Artifact:
    """Reads the artifact in folder `path`; with `verify`, checks the sha256 of every file.

    Raises ArtifactDamaged, naming the file, where it does not match its manifest.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files, volatile = manifest["files"], manifest["volatile"]
        artifact = Artifact(
            key=manifest["key"],
            kind=manifest["kind"],
            stage=manifest["stage"],
            schema_version=manifest["schema_version"],
            digest=manifest["digest"],
            path=path,
            metrics=manifest["metrics"],
            inputs={name: reference["key"] for name, reference in manifest["inputs"].items()},
            volatile=tuple(volatile),
            seconds=manifest["seconds"],
            size=sum(entry["bytes"] for entry in files.values()),
        )
    except FileNotFoundError:
        raise ArtifactDamaged(f"{path / MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactDamaged(f"{path / MANIFEST} cannot be read: {error!r}") from None
    if artifact.digest != _digest(files, volatile):
        raise ArtifactDamaged(f"{path / MANIFEST}: the digest does not fit the list of files")
    if verify:
        _verify(path, files)
    return artifact


def _verify(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entry in files.items():
        try:
            if (path / name).stat().st_size != entry["bytes"] or _sha256(path / name) != entry["sha256"]:
                raise ArtifactDamaged(f"{path / name} does not match its manifest")
        except FileNotFoundError:
            raise ArtifactDamaged(f"{path / name} is missing") from None


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"{path.name} is a symbolic link; an artifact holds its files itself")
        if path.is_file():
            entry = {"sha256": _sha256(path), "bytes": path.stat().st_size}
            files[path.relative_to(folder).as_posix()] = entry
    return files


def _digest(files: Mapping[str, Mapping[str, Any]], volatile: Sequence[str]) -> str:
    covered = {name: entry["sha256"] for name, entry in files.items() if name not in volatile}
    return hashlib.sha256(_canonical(covered).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _canonical(value: Any) -> str:
    _check_keys(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _check_keys(value: Any) -> None:
    """JSON would turn the keys 1 and "1" into the same text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a mapping in a stage key has the key {key!r}; only text is allowed")
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)


def lock_file(file: IO[str], what: str, timeout: float, on_wait: Callable[[str], None] | None = None) -> None:
    """Locks an open file against other threads and processes, until it is closed, and writes into it who holds it.

    what: for messages. `on_wait` is told once whom we wait for; WaitTimeout says it after `timeout` seconds.
    """
    start = time.monotonic()
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            waited = time.monotonic() - start
        holder = _holder(file)
        if waited >= timeout:
            raise WaitTimeout(f"waited {waited:.0f} s for {what}, which {holder} is making")
        if not told and on_wait is not None:
            on_wait(f"waiting for {what}, which {holder} is making")
            told = True
        time.sleep(min(0.25, 0.02 + waited / 10, max(timeout - waited, 0.001)))
    file.seek(0)
    file.truncate()
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}, file)
    file.flush()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']} (since {time.time() - holder['since']:.0f} s)"
    except ValueError:  # it has the lock but has not written its name yet
        return "another process"


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
