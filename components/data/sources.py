"""Rows of a source, as a stream: one row in memory at a time, or one batch of a table, within `components.data.rows`.

    rows(SourceSpec(path="train.jsonl"))               raises ResourceError at the first broken row
    rows(SourceSpec(path="train.jsonl"), on_broken)    passes broken rows to `on_broken` and continues

A broken row is a line that is not valid JSON, a value that is not an object, a CSV record with another number of
fields than the header, or a row that is too large. A file that is damaged as a whole (a truncated JSON array, Parquet
or compressed file) always raises ResourceError. Datasets of the Hugging Face hub are streamed with the
library `datasets`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from components.data.csv_records import csv_rows
from components.data.files import DataFile, data_files, digest, reading
from components.data.json_rows import InvalidJSON, columns_of, holds_lines, json_rows, line_rows
from components.data.rows import BrokenRow, DataRow, OnBroken, RowTooLarge
from components.data.served.rows import ServedSource
from components.data.spec import SourceSpec
from components.data.tables import Tables, json_data
from components.errors import ResourceError
from components.redaction import mask_text

_START = 4096
"""Bytes at the beginning of a file that its encoding is recognised from."""


def rows(spec: SourceSpec, on_broken: OnBroken | None = None) -> Iterator[DataRow]:
    """Yield the rows of a source in order, at most `spec.limit`. on_broken: called with each broken row; None raises
    ResourceError at the first. Raises ResourceError if the source cannot be read."""
    return islice(_rows(spec, on_broken or _refuse), spec.limit)


def content_digest(spec: SourceSpec) -> str:
    """Return a digest of the source's content: of the files, or of the commit of a dataset of the hub. Raises
    ResourceError if the source cannot be read."""
    if spec.dataset is not None:
        return f"{spec.dataset}@{commit(spec)}"
    if (served := ServedSource.of(spec)) is not None:
        return served.digest()
    return digest(data_files(spec))


def _rows(spec: SourceSpec, on_broken: OnBroken) -> Iterator[DataRow]:
    if spec.dataset is not None:
        name = "/".join(part for part in (spec.dataset, spec.config, spec.split or "train") if part)
        for number, values in enumerate(dataset_rows(spec), 1):
            yield DataRow(number, name, json_data(values))
        return
    if (served := ServedSource.of(spec)) is not None:
        yield from (DataRow(number, served.path, row) for number, row in enumerate(served.rows(), 1))
        return
    with Tables() as tables:
        for file in data_files(spec):
            if _has_content(file):
                yield from _file_rows(file, tables, on_broken)


def _file_rows(file: DataFile, tables: Tables, on_broken: OnBroken) -> Iterator[DataRow]:
    match file.format:
        case "parquet" | "arrow":
            return tables.rows(file, on_broken)
        case "csv":
            return csv_rows(file, on_broken)
        case "json" if not holds_lines(file):
            return _json(file, on_broken)
    return line_rows(file, on_broken)


def _has_content(file: DataFile) -> bool:
    """Return False for an empty file. Raises ResourceError for text that is not UTF-8 from its beginning, and for a
    JSON array in a file of JSON Lines."""
    with file.open() as stream, reading(file.uri):
        start = stream.read(_START)
    if file.format not in ("jsonl", "json", "csv", "text"):
        return True
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start:
        advice = "the text is UTF-16 or UTF-32, or no text; expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8 FILE"
        raise ResourceError(f"{file.uri}: {advice}")
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if file.format == "jsonl" and text.startswith(b"[") and text[1:].lstrip()[:1] in (b"{", b""):
        raise ResourceError(f"{file.uri}: holds a JSON array, not one object a line. Set data.format=json")
    return bool(text) or len(start) == _START or file.format == "csv"  # a table has a header


def _refuse(broken: BrokenRow) -> None:
    raise ResourceError(str(broken))


def _json(file: DataFile, on_broken: OnBroken) -> Iterator[DataRow]:
    with file.open() as stream:
        number = 0
        try:
            for number, values in enumerate(json_rows(stream), 1):
                try:
                    columns = columns_of(values)
                except ValueError as error:
                    on_broken(BrokenRow(number, file.uri, str(error)))
                else:
                    yield DataRow(number, file.uri, columns)
        except InvalidJSON as error:
            raise ResourceError(f"{file.uri}: {error}") from None
        except RowTooLarge as error:
            raise ResourceError(str(BrokenRow(number + 1, file.uri, str(error)))) from None


DEFAULT_SPLIT = "train"


def dataset_rows(spec: SourceSpec) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset of the hub. Raises ResourceError if the library is missing, or if the dataset, its
    configuration or its split cannot be loaded."""
    with _loading(spec):
        try:
            from datasets import load_dataset
        except ImportError:
            raise ResourceError(
                f"dataset = {spec.dataset}: the package `datasets` is missing. Install it with "
                "`pip install -e '.[hub]'`, or download the files and set path"
            ) from None
        yield from load_dataset(
            spec.dataset, spec.config, split=spec.split or DEFAULT_SPLIT, revision=spec.revision, streaming=True
        )


def commit(spec: SourceSpec) -> str:
    """Return the commit, configuration and split of a dataset of the hub, as text. Raises ResourceError if the hub
    cannot be reached."""
    from huggingface_hub import HfApi

    assert spec.dataset is not None
    with _loading(spec):
        sha = HfApi().dataset_info(spec.dataset, revision=spec.revision).sha
    return f"{sha}/{spec.config}/{spec.split or DEFAULT_SPLIT}"


@contextmanager
def _loading(spec: SourceSpec) -> Iterator[None]:
    """Convert errors of the hub and of its library to ResourceError."""
    import httpx

    try:
        yield
    except ResourceError:
        raise
    except (OSError, ValueError, RuntimeError, httpx.HTTPError) as error:
        raise ResourceError(
            f"dataset = {spec.dataset}: the Hugging Face hub did not return it "
            f"({type(error).__name__}: {mask_text(str(error).strip())[:500]}). Check name, config, split and the "
            "network connection (HF_TOKEN for private datasets), or download the files and set path"
        ) from None
