"""Scenarios of a dataset, stored on disk and read on demand.

The rows of the sources are read once, checked, and written as Arrow files to a cache folder named by their content and
the columns. Later processes map the files into memory and decode a scenario when it is used, so a dataset may be larger
than memory. While the rows are written, a digest of 16 bytes per prompt is in memory, to find duplicates.

A row belongs to a split by its source, or with one source by a hash of its prompt: moved or added rows do not change
the split of the others. The id of a scenario is a hash of its input.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

import orjson

from components.data.files import data_files
from components.data.rows import BrokenRow, DataRow
from components.data.sources import content_digest, rows
from components.data.spec import SourceSpec
from components.environments.dataset.columns import DatasetColumns, RowError
from components.errors import Problem, ResourceError, SpecError
from components.json_text import read_json
from components.trajectories.schema import Scenario

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the cached files; a higher one makes them again."""
SPLITS = ("heldout", "train")
BATCH = 1024
"""Scenarios of a batch, which is decoded at once when all scenarios are read."""
SHOWN = 3
"""Maximum number of rows that a message names."""
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Sources:
    """Sources of the splits."""

    train: SourceSpec
    heldout: SourceSpec | None
    """None: a share of `train`."""
    heldout_key: str
    """Key of the environment that names the held-out source, for messages."""
    share: float
    """Share of the prompts of `train` that are held out, if `heldout` is None."""
    drop_duplicates: bool
    """True to use the first of equal prompts, and to leave out training rows with a held-out prompt."""

    def __hash__(self) -> int:
        return hash((repr(self.train), repr(self.heldout), self.share))

    def split_of(self, prompt: bytes) -> str:
        """Return the split of a row of `train`, by the digest of its prompt."""
        held_out = self.heldout is None and int.from_bytes(prompt[:8], "big") < self.share * 2**64
        return "heldout" if held_out else "train"

    def entries(self) -> Iterator[tuple[str | None, str, SourceSpec]]:
        """Yield the split of each source (None: by the prompt), the key that names it, and the source."""
        if self.heldout is not None:
            yield "heldout", self.heldout_key, self.heldout
        key = "path" if self.train.dataset is None else "dataset"
        yield None if self.heldout is None else "train", key, self.train


class StoredScenarios(Sequence[Scenario]):
    """Scenarios of a split in a file that is mapped into memory."""

    def __init__(self, path: Path, split: str):
        import pyarrow as pa

        self._split = split
        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Scenario: ...

    @overload
    def __getitem__(self, index: slice) -> list[Scenario]: ...

    def __getitem__(self, index: int | slice) -> Scenario | list[Scenario]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._scenario(*(column[number].as_py() for column in self._table.columns))

    def __iter__(self) -> Iterator[Scenario]:
        for batch in self._table.to_batches():
            yield from map(self._scenario, *(column.to_pylist() for column in batch.columns))

    def _scenario(self, name: str, input: str, type: str, difficulty: int) -> Scenario:
        return Scenario(name, orjson.loads(input), self._split, type, difficulty)


@dataclass(frozen=True)
class StoredDataset:
    """Scenarios of both splits."""

    splits: Mapping[str, StoredScenarios]
    digest: str
    """Digest of all scenarios, for stage keys."""


def stored(sources: Sources, columns: DatasetColumns, cache: Path) -> StoredDataset:
    """Return the scenarios of the sources; read and store them if their content is new.

    Raises SpecError for rows that cannot be used, duplicates and empty splits, and ResourceError for a source that
    cannot be read.
    """
    present = tuple(_fingerprint(key, source) for _, key, source in sources.entries())
    return _stored(sources, columns, cache, present)


@functools.lru_cache(maxsize=8)  # a collector creates many environments with the same dataset
def _stored(sources: Sources, columns: DatasetColumns, cache: Path, present: tuple[Any, ...]) -> StoredDataset:
    """present: fingerprints of the sources, so that edited files are read again."""
    contents = [(split, _content(key, source)) for split, key, source in sources.entries()]
    recipe = [VERSION, contents, sources.share, sources.drop_duplicates, asdict(columns)]
    folder = cache / hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]
    if not (folder / SUMMARY).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".draft-") as temporary:
            draft = Path(temporary) / "dataset"
            draft.mkdir()
            _write(sources, columns, draft)
            try:
                draft.rename(folder)
            except OSError:
                if not (folder / SUMMARY).is_file():  # else another process was faster
                    raise
    splits = {split: StoredScenarios(folder / f"{split}.arrow", split) for split in SPLITS}
    return StoredDataset(splits, read_json(folder / SUMMARY)["digest"])


def _fingerprint(key: str, source: SourceSpec) -> Any:
    """Return what changes if the files of a source change, without reading them."""
    if source.dataset is not None:
        return None  # a process reads a dataset of the hub at one commit
    with _named(key):
        return tuple((file.uri, file.filesystem.ukey(file.path)) for file in data_files(source))


def _content(key: str, source: SourceSpec) -> str:
    with _named(key):
        return content_digest(source)


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    """Add the key of the environment to the errors of a source."""
    try:
        yield
    except ResourceError as error:
        raise ResourceError(f"environment.{key}: {error}") from None


@dataclass
class _Findings:
    """Rows that cannot be used, by key of the environment, with the first row of each reason."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    examples: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    nearest: dict[str, str | None] = field(default_factory=dict)

    def add(self, key: str, place: str, reason: str, near: str | None = None) -> None:
        """Count a row."""
        self.counts[key] += 1
        self.nearest.setdefault(key, near)
        if len(self.examples[key]) < SHOWN:
            self.examples[key].setdefault(reason, place)

    def problems(self) -> list[Problem]:
        """Return one problem for each key."""
        return [
            Problem(f"environment.{key}", f"{_rows(self.counts[key])} cannot be used: {self._shown(key)}", near)
            for key, near in self.nearest.items()
        ]

    def _shown(self, key: str) -> str:
        examples = [f"{place}: {reason}" for reason, place in self.examples[key].items()]
        others = self.counts[key] - len(examples)
        return "; ".join([*examples, *([f"and {_rows(others)} more"] if others else [])])


def _write(sources: Sources, columns: DatasetColumns, folder: Path) -> None:
    """Write the scenarios of both splits and their digest. Raises SpecError."""
    broken, equal = _Findings(), _Findings()
    prompts: dict[str, set[bytes]] = {split: set() for split in SPLITS}
    whole = hashlib.sha256()
    with _Files(folder) as files:
        for own_split, key, source in sources.entries():
            for row in _rows_of(key, source, broken):
                try:
                    task = columns.task(row.values)
                except RowError as error:
                    broken.add(error.key, row.place, str(error), error.nearest)
                    continue
                prompt = hashlib.sha256(_json(task.input["prompt"]).encode()).digest()[:16]
                split = own_split or sources.split_of(prompt)
                if any(prompt in others for others in prompts.values()):
                    equal.add("an earlier row" if prompt in prompts[split] else "a held-out row", row.place, "")
                    continue
                prompts[split].add(prompt)
                text = _json(task.input)
                name = hashlib.sha256(text.encode()).hexdigest()
                whole.update(_json([split, name, task.type, task.difficulty]).encode())
                files.add(split, {"id": name[:16], "input": text, "type": task.type, "difficulty": task.difficulty})
    if problems := broken.problems() or _duplicates(sources, equal) or _empty(sources, prompts):
        raise SpecError(problems)
    counts = {split: len(prompts[split]) for split in SPLITS}
    (folder / SUMMARY).write_text(json.dumps({"digest": whole.hexdigest(), "scenarios": counts}))


def _rows_of(key: str, source: SourceSpec, broken: _Findings) -> Iterator[DataRow]:
    def on_broken(row: BrokenRow) -> None:
        broken.add(key, f"{row.source}:{row.number}", row.reason)

    with _named(key):
        yield from rows(source, on_broken)


def _duplicates(sources: Sources, equal: _Findings) -> list[Problem]:
    """Return the problem of rows with the prompt of another; log them if they are dropped."""
    texts = [
        f"{_rows(count)} with the prompt of {other}, the first is {equal.examples[other]['']}"
        for other, count in equal.counts.items()
    ]
    if texts and sources.drop_duplicates:
        logger.warning("environment.duplicates=drop: left out %s", "; ".join(texts))
        return []
    message = f"{'; '.join(texts)}. Remove these rows, or set environment.duplicates=drop to leave them out"
    return [Problem("environment.duplicates", message)] if texts else []


def _empty(sources: Sources, prompts: Mapping[str, set[bytes]]) -> list[Problem]:
    """Return the problem of splits without rows."""
    total = sum(map(len, prompts.values()))
    names = {own_split: key for own_split, key, _ in sources.entries()}
    if not total:
        return [Problem(f"environment.{key}", "there are no rows") for key in names.values()]
    for split, hint in (("heldout", "a larger share"), ("train", "a smaller share")):
        if not prompts[split] and sources.heldout is None:
            message = f"{sources.share:g}: split {split!r} has none of {_rows(total)}; set {hint}, or heldout_path"
            return [Problem("environment.heldout_share", message)]
        if not prompts[split]:
            return [Problem(f"environment.{names[split]}", f"there are no rows for split {split!r}")]
    return []


class _Files:
    """Arrow files of the splits, written in batches."""

    def __init__(self, folder: Path):
        import pyarrow as pa

        text = pa.large_string()
        self._schema = pa.schema([("id", text), ("input", text), ("type", text), ("difficulty", pa.int32())])
        self._writers = {split: pa.ipc.new_file(folder / f"{split}.arrow", self._schema) for split in SPLITS}
        self._rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}

    def __enter__(self) -> _Files:
        return self

    def add(self, split: str, row: dict[str, Any]) -> None:
        """Add a row."""
        self._rows[split].append(row)
        if len(self._rows[split]) == BATCH:
            self._flush(split)

    def _flush(self, split: str) -> None:
        import pyarrow as pa

        batch, self._rows[split] = self._rows[split], []
        self._writers[split].write_batch(pa.RecordBatch.from_pylist(batch, self._schema))

    def __exit__(self, *error: Any) -> None:
        for split, writer in self._writers.items():
            self._flush(split)
            writer.close()


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, sort_keys=True)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def default_cache() -> Path:
    """Return the folder of stored datasets in the user's cache."""
    return Path.home() / ".cache" / "espalier" / "datasets"
