"""An artifact and its manifest: a folder of files, and the `manifest.json` that says what they have to be.

Whoever reads an artifact verifies it: each file has the size and sha256 that the manifest states, or the artifact is
damaged. A manifest may come from a store that others write to, so the paths in it are checked before they are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from components.artifacts.keys import file_digest, json_digest
from components.errors import ArtifactDamaged, ArtifactError

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1

Files = Mapping[str, Mapping[str, Any]]
"""`sha256` and `bytes` of each file by its path below the artifact's folder."""


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


def read_artifact(path: Path, *, verify: bool = True) -> Artifact:
    """Reads the artifact in folder `path`; with `verify`, checks the sha256 of every file.

    Raises ArtifactDamaged, naming the file, where it does not match its manifest, and ArtifactError where a newer
    Espalier has written it.
    """
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise ArtifactDamaged(f"{path / MANIFEST} is missing") from None
    artifact, files = parse_manifest(text, path, str(path))
    if verify:
        for name, entry in files.items():
            if not (path / name).is_file():
                raise ArtifactDamaged(f"{path / name} is missing")
            if not fits(path / name, entry):
                raise ArtifactDamaged(f"{path / name} does not match its manifest")
    return artifact


def parse_manifest(text: bytes, path: Path, where: str) -> tuple[Artifact, Files]:
    """The artifact that a manifest describes, and its files.

    path: the folder that holds the files, or shall hold them. where: name of the artifact's place, for messages.
    Raises as `read_artifact` does.
    """
    where = f"{where}/{MANIFEST}"
    try:
        manifest = json.loads(text)
        version = manifest["manifest_version"]
        if version > MANIFEST_VERSION:
            raise ArtifactError(
                f"{where} was written by a newer Espalier (manifest version {version}, this one reads "
                f"{MANIFEST_VERSION}): update, or use another root and store"
            )
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
        digest = content_digest(files, volatile)
    except ArtifactError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactDamaged(f"{where} cannot be read: {error!r}") from None
    if artifact.digest != digest:
        raise ArtifactDamaged(f"{where}: the digest does not fit the list of files")
    for name in files:
        if name == MANIFEST or name != str(PurePosixPath(name)) or {"/", ".."} & set(PurePosixPath(name).parts):
            raise ArtifactDamaged(f"{where}: {name!r} is no file below the artifact's folder")
    return artifact, files


def fits(path: Path, entry: Mapping[str, Any]) -> bool:
    """Whether a file has the size and sha256 that its entry in the manifest states."""
    return path.stat().st_size == entry["bytes"] and file_digest(path) == entry["sha256"]


def describe(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a folder, as a manifest lists them. Raises ValueError where one is a symbolic link."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"{path.name} is a symbolic link; an artifact holds its files itself")
        if path.is_file():
            entry = {"sha256": file_digest(path), "bytes": path.stat().st_size}
            files[path.relative_to(folder).as_posix()] = entry
    return files


def content_digest(files: Files, volatile: Sequence[str]) -> str:
    """The digest of an artifact with these files."""
    return json_digest({name: entry["sha256"] for name, entry in files.items() if name not in volatile})
