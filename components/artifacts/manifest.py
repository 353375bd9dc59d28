"""An artifact and its manifest: a folder of files, and the `manifest.json` that lists them.

Every reader verifies an artifact: its files are those that the manifest lists, each with the stated size and sha256, or
the artifact is damaged. A manifest may come from a store that others write to, so its values are validated, names are
checked before use (`names`), and no link is followed (`folders`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, ValidationError

from components.artifacts.files import READ_LIMIT
from components.artifacts.folders import Folder, UnsafePath
from components.artifacts.keys import json_digest
from components.artifacts.names import check_names, is_key
from components.errors import ArtifactDamaged, ArtifactError
from components.json_text import parse_json

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1

Files = Mapping[str, Mapping[str, Any]]
"""`sha256` and `bytes` of each file, by its path below the artifact's folder."""


@dataclass(frozen=True)
class Artifact:
    """Reference to a finished artifact; the data stay in its folder."""

    key: str
    """Stage key under which it is stored."""
    kind: str
    """Type of content: trajectories, scores, selection, checkpoint, evaluation or export."""
    stage: str
    """Stage that produced it."""
    schema_version: int
    """Version of its file layout."""
    digest: str
    """sha256 over the paths and sha256 of all non-volatile files: equal content, equal digest."""
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
    code: str = ""
    """Digest of the code that computed it, for information; empty if it is not recorded."""


def _key(text: str) -> str:
    if not is_key(text):
        raise ValueError("is not an artifact key")
    return text


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
Text = Annotated[str, Field(max_length=300)]
Key = Annotated[str, AfterValidator(_key)]


class _Entry(BaseModel):
    sha256: Digest
    bytes: int = Field(ge=0)


class _Reference(BaseModel):
    key: Key


class _Manifest(BaseModel):
    manifest_version: int
    kind: Word
    stage: Word
    schema_version: int
    key: Key
    digest: Digest
    seconds: FiniteFloat
    inputs: dict[Text, _Reference]
    metrics: dict[Text, FiniteFloat]
    files: dict[str, _Entry]
    volatile: list[str]
    spec: dict[str, Any] | None = None
    code: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""


def read_artifact(path: Path, *, verify: bool = True) -> Artifact:
    """Read the artifact in folder `path`. With `verify`, check by sha256 that its files are exactly those of the
    manifest. No symbolic link is followed.

    Raises ArtifactDamaged, naming the file, on a mismatch with the manifest, and ArtifactError if a newer Espalier
    wrote it.
    """
    try:
        with Folder(path) as folder:
            try:
                with folder.open(MANIFEST) as file:
                    text = file.read(READ_LIMIT + 1)
            except FileNotFoundError:
                raise ArtifactDamaged(f"{path / MANIFEST} is missing") from None
            artifact, files = parse_manifest(text, path, str(path))
            if verify:
                _verify(folder, files)
    except FileNotFoundError:
        raise ArtifactDamaged(f"{path / MANIFEST} is missing") from None
    except UnsafePath as error:
        raise ArtifactDamaged(f"{error.filename} {error.strerror}") from None
    return artifact


def _verify(folder: Folder, files: Files) -> None:
    for name, entry in files.items():
        try:
            intact = matches(folder, name, entry)
        except FileNotFoundError:
            raise ArtifactDamaged(f"{folder.path / name} is missing") from None
        if not intact:
            raise ArtifactDamaged(f"{folder.path / name} does not match its manifest")
    for name in folder.names():
        if name not in files and name != MANIFEST:
            raise ArtifactDamaged(f"{str(folder.path / name)!a} is not in its manifest")


def parse_manifest(text: bytes, path: Path, where: str) -> tuple[Artifact, Files]:
    """Return the artifact that a manifest describes, and its files.

    path: folder of the files, which need not exist yet. where: location of the artifact, for messages. Raises as
    `read_artifact` does.
    """
    where = f"{where}/{MANIFEST}"
    if len(text) > READ_LIMIT:
        raise ArtifactDamaged(f"{where} has more than {READ_LIMIT} bytes")
    try:
        data = parse_json(text)
        version = data.get("manifest_version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > MANIFEST_VERSION:
            raise ArtifactError(
                f"{where} was written by a newer Espalier (manifest version {version}, this one reads "
                f"{MANIFEST_VERSION}): update, or use another root and store"
            )
        manifest = _Manifest.model_validate(data, strict=True)
        check_names(manifest.files, MANIFEST)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ArtifactDamaged(f"{where} cannot be read: {place!a}: {first['msg']!a}") from None
    except ArtifactError:
        raise
    except ValueError as error:
        raise ArtifactDamaged(f"{where} cannot be read: {error}") from None
    files = {name: entry.model_dump() for name, entry in manifest.files.items()}
    artifact = Artifact(
        key=manifest.key,
        kind=manifest.kind,
        stage=manifest.stage,
        schema_version=manifest.schema_version,
        digest=manifest.digest,
        path=path,
        metrics=manifest.metrics,
        inputs={name: reference.key for name, reference in manifest.inputs.items()},
        volatile=tuple(manifest.volatile),
        seconds=manifest.seconds,
        size=sum(entry.bytes for entry in manifest.files.values()),
        code=manifest.code,
    )
    if artifact.digest != content_digest(files, manifest.volatile):
        raise ArtifactDamaged(f"{where}: the digest does not fit the list of files")
    return artifact, files


def matches(folder: Folder, name: str, entry: Mapping[str, Any]) -> bool:
    """Return True if a file has the size and sha256 of its manifest entry. Raise FileNotFoundError and UnsafePath as
    `Folder.open` does."""
    with folder.open(name) as file:
        same_size = os.fstat(file.fileno()).st_size == entry["bytes"]
        return same_size and hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]


def describe(path: Path) -> dict[str, dict[str, Any]]:
    """Return the files of a folder as manifest entries. Raise ValueError if one is not a regular file, or has a name
    that a manifest does not allow."""
    files = {}
    with Folder(path) as folder:
        for name in sorted(folder.names()):
            try:
                with folder.open(name) as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    files[name] = {"sha256": digest, "bytes": os.fstat(file.fileno()).st_size}
            except UnsafePath:
                raise ValueError(f"{name!a} is a symbolic link or pipe; expected a regular file") from None
    check_names(files, MANIFEST)
    return files


def content_digest(files: Files, volatile: Sequence[str]) -> str:
    """Return the digest of an artifact with these files."""
    return json_digest({name: entry["sha256"] for name, entry in files.items() if name not in volatile})
