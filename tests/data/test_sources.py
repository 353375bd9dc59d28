"""Rows of files, folders, patterns, URIs and datasets."""

import bz2
import csv
import gzip
import json
import lzma
import uuid
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.rows import BrokenRow, DataRow
from components.data.sources import content_digest, rows
from components.data.spec import SourceSpec
from components.errors import ResourceError, SpecError
from components.specs import validate

ROWS = [{"prompt": f"question {number}", "n": number, "tags": ["a", None]} for number in range(5)]


def write(path: Path, content: list[dict] = ROWS) -> Path:
    """Write rows in the format of the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in content)
    match "".join(path.suffixes):
        case ".jsonl":
            path.write_text(lines)
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case ".jsonl.bz2":
            path.write_bytes(bz2.compress(lines.encode()))
        case ".jsonl.xz":
            path.write_bytes(lzma.compress(lines[:20].encode()) + bytes(8) + lzma.compress(lines[20:].encode()))
        case ".jsonl.zst":
            parts = (zstandard.compress(part.encode()) for part in (lines[:20], lines[20:]))
            path.write_bytes(b"".join(parts))  # two frames, as parallel compressors write them
        case ".json":
            path.write_text(json.dumps(content))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(content), path)
        case ".csv" | ".tsv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(content[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
                writer.writeheader()
                writer.writerows(content)
    return path


def values(**source: object) -> list[dict]:
    return [row.values for row in rows(validate(SourceSpec, source))]


def test_tables_of_other_filesystems_and_compressed_ones_are_read(tmp_path):
    local = write(tmp_path / "a.parquet")
    place = f"memory://{uuid.uuid4().hex}"
    with fsspec.open(f"{place}/a.parquet", "wb") as file:
        file.write(local.read_bytes())
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(local.read_bytes()))
    assert values(path=f"{place}/*.parquet") == values(path=str(tmp_path / "b.parquet.gz")) == ROWS
    assert values(path=str(tmp_path / "*.parquet*")) == ROWS * 2


def test_a_file_gives_its_rows_with_numbers_and_limit(tmp_path, subtests):
    for suffix in [".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst", ".json", ".parquet"]:
        with subtests.test(suffix=suffix):
            path = write(tmp_path / f"a{suffix}")
            assert list(rows(SourceSpec(path=str(path), limit=2))) == [
                DataRow(1, str(path), ROWS[0]),
                DataRow(2, str(path), ROWS[1]),
            ]
            assert values(path=str(path)) == ROWS


def test_a_table_of_text_gives_text_and_the_lines_of_its_records(tmp_path, subtests):
    for suffix in [".csv", ".tsv"]:
        with subtests.test(suffix=suffix):
            content = [{"prompt": 'two\nlines, "quoted"', "answer": "4" * 200_000}, {"prompt": "b", "answer": ""}]
            path = write(tmp_path / f"a{suffix}", content)
            assert [(row.number, row.values) for row in rows(SourceSpec(path=str(path)))] == [
                (2, content[0]),
                (4, content[1]),
            ]


def test_an_object_gives_the_rows_of_its_array(tmp_path, subtests):
    for key in ["data", "rows", "train"]:
        with subtests.test(key=key):
            (tmp_path / "a.json").write_text(json.dumps({"version": [1], key: ROWS, "notes": {}}))
            assert values(path=str(tmp_path / "a.json")) == ROWS


def test_lines_in_a_file_named_json_are_read_as_lines(tmp_path):
    write(tmp_path / "a.jsonl").rename(tmp_path / "a.json")
    assert values(path=str(tmp_path / "a.json")) == ROWS


def test_lines_after_many_blank_ones_are_read(tmp_path):
    (tmp_path / "late.jsonl").write_text("\n" * 5000 + json.dumps(ROWS[0]) + "\n")
    assert [row.values for row in rows(SourceSpec(path=str(tmp_path / "late.jsonl")))] == ROWS[:1]


def test_an_object_over_several_lines_is_one_row(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS[0], indent=1))
    assert values(path=str(tmp_path / "a.json")) == ROWS[:1]


def test_folders_patterns_and_lists_give_the_rows_of_their_files_in_order(tmp_path):
    write(tmp_path / "data" / "b.jsonl", ROWS[2:4])
    write(tmp_path / "data" / "a.jsonl", ROWS[:2])
    write(tmp_path / "data" / "deep" / "c.jsonl", ROWS[4:])
    (tmp_path / "data" / "README.md").write_text("a data set")
    (tmp_path / "data" / ".cache.jsonl").write_text("hidden")
    (tmp_path / "data" / "dataset_info.json").write_text("{}")
    assert values(path=str(tmp_path / "data")) == ROWS
    assert values(path=str(tmp_path / "data" / "*.jsonl")) == ROWS[:4]
    assert values(path=[str(tmp_path / "data" / name) for name in ("b.jsonl", "a.jsonl")]) == [*ROWS[2:4], *ROWS[:2]]


def test_a_split_chooses_files_by_name_or_folder(tmp_path):
    write(tmp_path / "train-00000-of-00001.jsonl", ROWS[:2])
    write(tmp_path / "test.jsonl", ROWS[2:4])
    write(tmp_path / "validation" / "a.jsonl", ROWS[4:])
    assert values(path=str(tmp_path), split="train") == ROWS[:2]
    assert values(path=str(tmp_path), split="validation") == ROWS[4:]
    with pytest.raises(ResourceError, match=r"split = dev: no file of .* begins with 'dev'; .*test.jsonl"):
        values(path=str(tmp_path), split="dev")


def test_uris_are_read_with_fsspec():
    place = f"memory://{uuid.uuid4().hex}"
    with fsspec.open(f"{place}/a.jsonl", "w") as file:
        file.write(json.dumps(ROWS[0]))
    for path in (f"{place}/a.jsonl", place, f"{place}/*.jsonl"):
        (row,) = rows(SourceSpec(path=path))
        assert row.values == ROWS[0]
        assert row.source == row.place.removesuffix(":1") == f"memory:///{place.removeprefix('memory://')}/a.jsonl"


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert values(path=str(tmp_path / "saved")) == ROWS


TEXTS = ["Say hello.", "Tür 漢字", "[1]"]


def test_a_list_of_texts_has_the_column_prompt(tmp_path, subtests):
    written = {
        "a.json": json.dumps(TEXTS),
        "a.jsonl": "".join(f"{json.dumps(text)}\n" for text in TEXTS),
        "a.txt": "\ufeff" + "\r\n\n".join(TEXTS) + "\n",
    }
    for name, text in written.items():
        with subtests.test(name=name):
            (tmp_path / name).write_bytes(text.encode())
            assert values(path=str(tmp_path / name)) == [{"prompt": text} for text in TEXTS]
    (tmp_path / "b").write_bytes(b"one\n\xff\n")
    with pytest.raises(ResourceError, match=r"b:2: the text is not UTF-8"):
        values(path=str(tmp_path / "b"), format="text")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.txt").write_text("These are rows.\n")
    (folder / "a.json").write_text(json.dumps(TEXTS))
    assert values(path=str(folder)) == [{"prompt": text} for text in TEXTS]  # without the README


def test_values_of_tables_become_json_data(tmp_path):
    from datetime import date
    from decimal import Decimal

    schema = pa.schema(
        [("d", pa.date32()), ("n", pa.decimal128(5, 2)), ("b", pa.binary()), ("m", pa.map_(pa.string(), pa.int64()))]
    )
    content = [{"d": date(2025, 1, 2), "n": Decimal("1.25"), "b": b"\xff", "m": [("k", 1)]}]
    pq.write_table(pa.Table.from_pylist(content, schema), tmp_path / "a.parquet")
    assert values(path=str(tmp_path / "a.parquet")) == [{"d": "2025-01-02", "n": 1.25, "b": None, "m": {"k": 1}}]


BROKEN = {
    "jsonl": ('{"a": 1}\n{"a": \n\n[1]\n{"a": 2}\n', [(2, "invalid JSON"), (4, "expected a JSON object")]),
    "json": ('[{"a": 1}, 7, {"a": 2}]', [(2, "expected a JSON object, got a int")]),
    "csv": (
        "a,b\n1,2\n1\n1,2,3\n\udcff,2\n3,4\n",
        [(3, "1 fields; expected 2"), (4, "3 fields"), (5, "the text is not UTF-8")],
    ),
}


def test_a_broken_row_is_reported_with_file_and_number(tmp_path, subtests):
    for format_ in BROKEN:
        with subtests.test(format_=format_):
            text, expected = BROKEN[format_]
            path = tmp_path / f"a.{format_}"
            path.write_text(text, errors="surrogateescape")
            with pytest.raises(ResourceError, match=rf"{path}:{expected[0][0]}: .*{expected[0][1]}"):
                list(rows(SourceSpec(path=str(path))))
            broken: list[BrokenRow] = []
            assert len(list(rows(SourceSpec(path=str(path)), broken.append))) == 2
            assert [row.number for row in broken] == [number for number, _ in expected]
            assert all(reason in row.reason for row, (_, reason) in zip(broken, expected, strict=True))


UNREADABLE = {
    "a.json": b'[{"a": 1}, {"a":',
    "b.json": b"[" * 100_000,
    "c.json": b"3",
    "a.parquet": b"PAR1 no table",
    "a.jsonl.gz": gzip.compress(b'{"a": 1}\n' * 1000)[:40],
    "b.jsonl.gz": b"not compressed",
    "a.jsonl.xz": lzma.compress(b'{"a": 1}\n' * 1000)[:-40],
    "b.jsonl.zst": b"not compressed",
    "a.csv": b"",
    "b.csv": b"a,a\n1,2\n",
    "a.md": b"text",
    "c.jsonl": b'[{"a": 1},\n {"a": 2}]',
    "d.jsonl": '{"a": "b"}'.encode("utf-16"),
    "c.csv": "a,b\n1,2\n".encode("utf-16"),
}


def test_a_damaged_file_is_reported_by_name(tmp_path, subtests):
    for name in UNREADABLE:
        with subtests.test(name):
            path = tmp_path / name
            path.write_bytes(UNREADABLE[name])
            with pytest.raises(ResourceError, match=name):
                list(rows(SourceSpec(path=str(path)), lambda broken: None))


def test_places_without_data_are_reported(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "mixed" / "a.jsonl")
    write(tmp_path / "mixed" / "b.parquet")
    for path, message in {
        "away.jsonl": "there is no file",
        "empty": "there are no data files at",
        "*.jsonl": "there are no data files at",
        "mixed": "several formats .jsonl, parquet.* Set format",
    }.items():
        with pytest.raises(ResourceError, match=message):
            values(path=str(tmp_path / path))
    assert values(path=str(tmp_path / "mixed"), format="parquet") == ROWS
    with pytest.raises(ResourceError, match="nosuch"):
        values(path="nosuch://bucket/a.jsonl")


def test_an_unreachable_hub_is_reported(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", "http://127.0.0.1:9")
    source = SourceSpec(dataset="someone/away")
    for read in (lambda: list(rows(source)), lambda: content_digest(source)):
        with pytest.raises(ResourceError, match=r"dataset = someone/away: the Hugging Face hub did not return it"):
            read()


def test_a_missing_library_is_reported(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ResourceError, match=r"pip install -e '\.\[hub\]'"):
        list(rows(SourceSpec(dataset="someone/data")))


def test_the_digest_depends_on_content_and_not_on_paths(tmp_path):
    first, second = write(tmp_path / "a.jsonl"), write(tmp_path / "deep" / "b.jsonl")
    assert content_digest(SourceSpec(path=str(first))) == content_digest(SourceSpec(path=str(second)))
    write(second, ROWS[:-1])
    assert content_digest(SourceSpec(path=str(first))) != content_digest(SourceSpec(path=str(second)))


def test_options_of_another_source_are_refused():
    with pytest.raises(SpecError) as error:
        validate(SourceSpec, {"path": "a.jsonl", "dataset": "b", "config": None})
    assert "dataset: set together with path" in str(error.value)
    with pytest.raises(SpecError, match="config: set without dataset"):
        validate(SourceSpec, {"path": "a.jsonl", "config": "main"})


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(content=st.lists(st.dictionaries(TEXT, JSON, max_size=4)))
def test_any_rows_round_trip_as_json_and_as_lines(content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.json").write_text(json.dumps(content))
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    assert values(path=str(folder / "a.json")) == content
    assert values(path=str(folder / "a.jsonl")) == content


TYPES = st.recursive(
    st.sampled_from([pa.int64(), pa.string(), pa.bool_(), pa.null()]),
    lambda inner: (
        inner.map(pa.list_)
        | inner.map(pa.large_list)
        | inner.map(lambda kind: pa.list_(kind, 2))
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(lambda fields: pa.struct(list(fields.items())))
    ),
    max_leaves=4,
)


def of_type(kind: pa.DataType) -> st.SearchStrategy:
    """Return a strategy of values of an Arrow type, in Python."""
    if isinstance(kind, pa.StructType):
        return st.none() | st.fixed_dictionaries({field.name: of_type(field.type) for field in kind})
    if isinstance(kind, pa.FixedSizeListType):
        return st.lists(of_type(kind.value_type), min_size=2, max_size=2)
    if isinstance(kind, pa.ListType | pa.LargeListType):
        return st.none() | st.lists(of_type(kind.value_type), max_size=3)
    leaves = {pa.int64(): st.integers(-(2**63), 2**63 - 1), pa.bool_(): st.booleans(), pa.null(): st.none()}
    return st.none() | leaves.get(kind, TEXT)


@settings(max_examples=20)
@given(data=st.data())
def test_any_table_gives_the_values_of_its_rows(data, tmp_path_factory):
    schema = pa.schema([("x", data.draw(TYPES)), ("y", pa.dictionary(pa.int32(), pa.string()))])
    row = st.fixed_dictionaries({field.name: of_type(field.type) for field in schema})
    content = data.draw(st.lists(row, max_size=6))
    table = pa.Table.from_pylist(content, schema)
    folder = tmp_path_factory.mktemp("tables")
    with pa.ipc.new_stream(str(folder / "a.arrow"), schema) as stream:
        stream.write_table(table, max_chunksize=data.draw(st.integers(1, 6)))
    assert values(path=str(folder / "a.arrow")) == content
    try:
        pq.write_table(table, folder / "a.parquet", row_group_size=data.draw(st.integers(1, 6)))
    except pa.ArrowNotImplementedError:
        return  # types that Parquet does not have
    try:
        expected = pq.read_table(folder / "a.parquet").to_pylist()
    except pa.ArrowInvalid:  # lists of a fixed size within a null
        with pytest.raises(ResourceError, match="not a complete Parquet file"):
            values(path=str(folder / "a.parquet"))
    else:
        assert values(path=str(folder / "a.parquet")) == expected


@settings(max_examples=20)
@given(data=st.data())
def test_any_damage_of_a_table_gives_rows_or_an_error_with_its_place(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage")
    name = data.draw(st.sampled_from(["a.parquet", "a.arrow"]))
    table = pa.Table.from_pylist(ROWS)
    if name == "a.parquet":
        pq.write_table(table, folder / name)
    else:
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) // 2]))])
    check_rows_or_an_error_with_its_place(folder / name)


@given(text=st.binary(max_size=200))
def test_any_bytes_give_rows_or_an_error_with_their_place(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    for name in ("a.json", "a.jsonl", "a.csv", "a.jsonl.gz"):
        (folder / name).write_bytes(text)
        check_rows_or_an_error_with_its_place(folder / name)


def check_rows_or_an_error_with_its_place(path: Path) -> None:
    try:
        for row in rows(SourceSpec(path=str(path)), lambda broken: None):
            assert isinstance(row.values, dict)
    except ResourceError as error:
        message = str(error)
    else:
        message = path.name
    assert path.name in message
