"""Bundle of a run: what another machine needs to recompute its stages and to compare the results.

    BUNDLE/bundle.json        run, configuration, versions, and each stage with its request, key, digest and files
    BUNDLE/artifacts/<key>/   artifacts of the run, as in a store

`needed` artifacts are those that no stage of the run computes (the checkpoint of a forked run), those of stages that
read files or ask language models elsewhere, the evaluations, and the final policy. A bundle without artifacts still
verifies every stage that can be recomputed, because `bundle.json` holds the digests.

Paths of the machine are left out of the configuration; secrets are masked in the records of runs.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from components.artifacts import MANIFEST, Artifact, read_artifact
from components.artifacts.keys import file_digest, json_digest
from components.artifacts.names import is_key
from components.deployment.card import placeless
from components.errors import ArtifactDamaged, ArtifactError, EspalierError, ResourceError
from components.json_text import parse_json
from components.rewards.llm.spec import asked_by
from components.specs import validate
from components.specs.wording import first_problem
from flows.history.records import RunRecord, StageRecord
from flows.history.store_reader import StoreReader
from flows.stages import STAGES
from flows.stages.base import Request

FILE = "bundle.json"
ARTIFACTS = "artifacts"
ARCHIVE = ".tar.gz"
FORMAT = 1
Contents = Literal["needed", "all", "none"]
MOST_EXPANSION = 50
"""Limit on the unpacked size of an archive, as a multiple of its own."""
SMALL = 64 * 1024**2
"""Unpacked size in bytes that every archive may have."""
MOST_FILES = 100_000
LARGEST_READ = 1024**2
"""Bytes of an archive that are read at once."""
READS_FILES = ("import", "feedback")
"""Stages that read files which are no artifacts."""


@dataclass(frozen=True)
class BundledStage:
    """Stage of a bundled run."""

    label: str
    request: dict[str, Any]
    """`flows.stages.base.Request` as JSON."""
    version: int
    key: str
    digest: str
    kind: str
    files: dict[str, dict[str, Any]]
    """`sha256` and `bytes` of each file."""
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Bundle:
    """Content of `bundle.json`."""

    run: str
    """Id of the run."""
    name: str
    """Name of the experiment."""
    seed: int
    git_commit: str | None
    packages: dict[str, str]
    """Versions of the packages of the run, by name."""
    overrides: list[str]
    spec: dict[str, Any]
    """Composed configuration without paths of the machine."""
    result: dict[str, Any] | None
    stages: list[BundledStage]
    contents: Contents
    included: dict[str, str] = field(default_factory=dict)
    """sha256 of the manifest of each artifact in the bundle, by key."""

    def stage(self, label: str) -> BundledStage:
        """Return the stage with this label. Raises ResourceError if the bundle does not have it."""
        for stage in self.stages:
            if stage.label == label:
                return stage
        labels = ", ".join(stage.label for stage in self.stages) or "none"
        raise ResourceError(f"the bundle has no stage {label!r}; it has: {labels}")


def write_bundle(run: RunRecord, reader: StoreReader, out: Path, contents: Contents) -> Bundle:
    """Write the bundle of a run as a new folder, or as an archive if the name of `out` ends with `.tar.gz`.

    Raises ResourceError if `out` exists or cannot be written, if the run has no stages, or if an artifact of it is
    missing from the store."""
    if out.exists():
        raise ResourceError(
            f"--out {out}: exists already; expected the name of a new folder or of a new {ARCHIVE} file"
        )
    if not run.stages:
        raise ResourceError(f"run {run.short} has no finished stage to bundle")
    stages = [_bundled(stage, reader) for stage in _last_of_each_label(run)]
    keys = _keys(stages, contents)
    bundle = Bundle(
        run=run.id,
        name=run.name,
        seed=run.seed,
        git_commit=run.git_commit,
        packages=run.packages,
        overrides=[override for override in run.overrides if not override.startswith(("root=", "store="))],
        spec=placeless(run.spec),
        result=run.result and {name: value for name, value in run.result.items() if name not in ("export", "report")},
        stages=stages,
        contents=contents,
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".bundle-", dir=out.parent) as scratch:
            folder = Path(scratch) / run.name
            _fill(folder, bundle, keys, reader)
            if out.name.endswith(ARCHIVE):
                part = Path(scratch) / out.name
                with tarfile.open(part, "w:gz") as archive:
                    archive.add(folder, arcname=run.name)
                part.rename(out)
            else:
                folder.rename(out)
    except EspalierError:
        raise
    except OSError as error:
        raise ResourceError(f"cannot write {out}: {error.strerror or error}; give another path: --out PATH") from None
    return bundle


def _fill(folder: Path, bundle: Bundle, keys: Collection[str], reader: StoreReader) -> None:
    (folder / ARTIFACTS).mkdir(parents=True)
    for key in keys:
        with reader.opened(key) as artifact:
            if artifact is None:
                raise ResourceError(
                    f"artifact {key[:12]} is missing from the store or damaged, so it cannot be bundled"
                )
            shutil.copytree(artifact.path, folder / ARTIFACTS / key)
        bundle.included[key] = file_digest(folder / ARTIFACTS / key / MANIFEST)
    content = asdict(bundle)
    text = json.dumps({"format": FORMAT, "digest": json_digest(content), **content}, indent=1, ensure_ascii=False)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


@contextmanager
def opened_bundle(path: Path) -> Iterator[tuple[Bundle, Path]]:
    """Provide the bundle and its folder. An archive is unpacked to a temporary folder, a file `bundle.json` stands for
    its folder, under any name. Every artifact is checked against its manifest and against `bundle.json`.

    Raises ResourceError if `path` is no bundle, and ArtifactDamaged, naming the file, if a file of it was changed."""
    if path.is_file() and path.name.endswith(ARCHIVE):
        with TemporaryDirectory() as scratch:
            try:
                _unpack(path, Path(scratch))
            except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
                raise ResourceError(f"{path} is not a readable archive: {error}") from None
            files = list(Path(scratch).glob(f"*/{FILE}"))
            if len(files) != 1:
                raise ResourceError(f"{path} holds no {FILE}; expected an archive that flows.bundle wrote")
            yield _read(files[0]), files[0].parent
        return
    if not path.exists():
        raise ResourceError(f"{path} does not exist; expected a bundle that flows.bundle wrote")
    file = path if path.is_file() else path / FILE
    yield _read(file), file.parent


def _unpack(path: Path, folder: Path) -> None:
    """Unpack an archive of plain files and folders. Raises OSError for one that expands beyond the limits."""
    limit = max(SMALL, MOST_EXPANSION * path.stat().st_size)
    limit = min(limit, shutil.disk_usage(folder).free)
    with (
        gzip.open(path) as stream,
        _Bounded(stream, limit) as bounded,
        tarfile.open(fileobj=bounded, mode="r:") as archive,
    ):
        for number, member in enumerate(archive):
            if number >= MOST_FILES:
                raise OSError(f"more than {MOST_FILES:,} entries")
            if member.issparse() or not (member.isreg() or member.isdir()):  # holes of any size cost no bytes
                raise OSError(f"{member.name[:99]!r} is no plain file or folder")
            if PurePath(member.name).is_absolute():
                raise tarfile.AbsolutePathError(member)
            archive.extract(member, folder, filter="data")


class _Bounded(io.RawIOBase):
    """Decompressed stream of which at most `limit` bytes can be read, and at most `LARGEST_READ` at once: the sizes in
    the headers of an archive are its author's."""

    def __init__(self, stream: gzip.GzipFile, limit: int):
        self._stream, self._limit = stream, limit

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= LARGEST_READ:
            raise OSError(f"a header of {size:,} bytes")
        self._check(self.tell() + size - 1)
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check(offset)
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def _check(self, position: int) -> None:
        if position >= self._limit + tarfile.RECORDSIZE:  # the end of an archive is padded
            raise OSError(f"expands to more than {self._limit / 1e6:,.0f} MB")


def _read(path: Path) -> Bundle:
    try:
        data = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ResourceError(f"{path.parent} holds no {FILE}; expected a bundle that flows.bundle wrote") from None
    except (OSError, ValueError) as error:
        raise ArtifactDamaged(f"{path} cannot be read: {error}") from None
    version = data.pop("format", None) if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise ArtifactError(f"{path} has format {version}, this Espalier reads {FORMAT}: update")
    if version != FORMAT or data.pop("digest", None) != json_digest(data):
        raise ArtifactDamaged(f"{path} is not a bundle, or was changed after it was written: its digest differs")
    try:
        bundle = TypeAdapter(Bundle).validate_python(data)
    except ValidationError as error:
        raise ArtifactDamaged(f"{path} is not valid: {first_problem(error)}") from None
    for stage in bundle.stages:
        if stage.request.get("stage") not in STAGES:
            raise ArtifactDamaged(f"{path}: {stage.label[:99]!a} is no stage of this Espalier")
        if not is_key(stage.key):
            raise ArtifactDamaged(f"{path}: {stage.key[:50]!a} is not an artifact key")
        try:
            Request.from_json(stage.request)
        except ResourceError as error:
            raise ArtifactDamaged(f"{path}: {stage.label[:99]!a}: {error}") from None
    digests = {stage.key: stage.digest for stage in bundle.stages}
    for key, manifest in bundle.included.items():
        if not is_key(key):
            raise ArtifactDamaged(f"{path}: {key[:50]!a} is not an artifact key")
        artifact = read_artifact(path.parent / ARTIFACTS / key)
        if file_digest(artifact.path / MANIFEST) != manifest or artifact.digest != digests.get(key, artifact.digest):
            raise ArtifactDamaged(f"{artifact.path} is not the artifact that {path.name} names: its digest differs")
    return bundle


def _last_of_each_label(run: RunRecord) -> list[StageRecord]:
    return list({stage.label: stage for stage in run.stages}.values())


def _bundled(stage: StageRecord, reader: StoreReader) -> BundledStage:
    manifest = reader.manifest(stage.key)
    if manifest is None:
        raise ResourceError(
            f"{stage.label} {stage.key[:12]} is not in the store (deleted by flows.runs clean?); run the experiment "
            "again"
        )
    request = dict(stage.request)
    if "experiment" in request["spec"]:  # for the model card, which names no paths either
        request["spec"] = request["spec"] | {"experiment": placeless(request["spec"]["experiment"])}
    return BundledStage(
        label=stage.label,
        request=request,
        version=stage.version,
        key=stage.key,
        digest=stage.digest,
        kind=stage.kind,
        files=manifest["files"],
        metrics=manifest["metrics"],
        seconds=manifest["seconds"],
    )


def unrepeatable(request: Request) -> str:
    """Return the reason why a request cannot be recomputed from artifacts alone; empty if it can. Raises SpecError."""
    if request.stage in READS_FILES:
        return "reads files that are not artifacts"
    spec = validate(STAGES[request.stage].spec, request.spec, path=request.stage, allow=request.allow)
    inference = getattr(spec, "inference", None)
    if inference is not None and not inference.loads_policies:
        return "samples from a model that another server holds"
    reward = spec.applied_reward()
    asked = [] if reward is None else [model.label for model in asked_by(reward) if not model.asks_policy]
    return f"asks the language model {', '.join(asked)}" if asked else ""


def _policy(stages: list[BundledStage]) -> str | None:
    """Return the key of the final policy: that which was deployed, else that which was trained last."""
    deployed = [stage.request["inputs"].get("policy") for stage in stages if stage.request["stage"] == "deploy"]
    trained = [stage.key for stage in stages if stage.kind == "checkpoint"]
    return next(iter([*deployed[-1:], *trained[-1:]]), None)


def _keys(stages: list[BundledStage], contents: Contents) -> list[str]:
    """Return the keys of the artifacts to include."""
    if contents == "none":
        return []
    needed = {_policy(stages)} | {
        stage.key for stage in stages if stage.kind == "evaluation" or unrepeatable(Request.from_json(stage.request))
    }
    chosen = {stage.key for stage in stages} if contents == "all" else needed
    return sorted(key for key in chosen | _foreign_keys(stages) if key is not None)


def _foreign_keys(stages: list[BundledStage]) -> set[str]:
    """Return the keys of inputs that no stage of the run computes."""
    return {key for stage in stages for key in stage.request["inputs"].values()} - {stage.key for stage in stages}


def artifact_of(folder: Path, key: str, included: Collection[str]) -> Artifact | None:
    """Return an artifact of a bundle; None if the bundle does not include it."""
    return read_artifact(folder / ARTIFACTS / key, verify=False) if key in included else None
