"""Files that decode to far more than their size: each costs bounded memory, and names file, row, size and limit."""

import functools
import gzip
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.data.rows import ROW_BYTES, BrokenRow
from components.data.sources import rows
from components.data.spec import SourceSpec
from components.json_process import safe_environment

MEGABYTE = 1 << 20
MEMORY = 200
"""Maximum memory of each process that reads such a file, in MB; reading a small file takes 60."""
LONG = 180
"""Length of a row in MB that does not fit into this memory."""
READ = """
import json, resource, sys
from components.data.sources import rows
from components.data.spec import SourceSpec
from components.errors import ResourceError

for path in sys.argv[1:]:
    with open("/proc/self/clear_refs", "w") as peaks:
        peaks.write("5")  # VmHWM begins again
    problems = []
    try:
        read = sum(1 for _ in rows(SourceSpec(path=path), lambda broken: problems.append(str(broken))))
    except ResourceError as error:
        read, problems = 0, [*problems, str(error)]
    own = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])  # ru_maxrss is that of the test too
    megabytes = [own >> 10, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10]  # of the children until now
    print(json.dumps({"rows": read, "problems": problems, "megabytes": megabytes}))
"""
GOOD = {"a": "small"}


def read(paths: list[Path]) -> list[dict]:
    """Return rows, problems and the peak memory of the two processes when a new process reads each file."""
    command = [sys.executable, "-c", READ, *map(str, paths)]
    done = subprocess.run(command, env=safe_environment(), capture_output=True, text=True, timeout=900, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def repeated(count: int, size: int) -> pa.Array:
    """Return `count` equal strings as an array that stores one."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * size]))


def parquet(*columns: pa.Array) -> Callable[[Path], None]:
    names = list("abcdef"[: len(columns)])
    return lambda path: pq.write_table(pa.table(list(columns), names), path, compression="zstd", store_schema=False)


def arrow(*columns: pa.Array) -> Callable[[Path], None]:
    batch = pa.record_batch(list(columns), list("abcdef"[: len(columns)]))
    options = pa.ipc.IpcWriteOptions(compression="zstd")

    def write(path: Path) -> None:
        with pa.ipc.new_stream(str(path), batch.schema, options=options) as stream:
            stream.write_batch(batch)

    return write


def text(before: str, part: str, after: str, repeat: int = LONG) -> Callable[[Path], None]:
    """Return a writer of a compressed text whose middle is `repeat` MB of `part`."""

    def write(path: Path) -> None:
        opened = {".gz": gzip.open, ".xz": functools.partial(lzma.open, preset=0)}[path.suffix]
        block = (part * (MEGABYTE // len(part))).encode()
        with opened(path, "wb") as file:
            file.write(before.encode())
            for _ in range(repeat):
                file.write(block)
            file.write(after.encode())

    return write


def large_window(path: Path) -> None:
    """Write a file whose decoder keeps the last 512 MB."""
    window = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 512 * MEGABYTE, "mode": lzma.MODE_FAST}]
    path.write_bytes(lzma.compress(LINE.encode(), filters=window))


LINE = json.dumps(GOOD) + "\n"
BOMBS = {
    "equal.parquet": (lambda: parquet(repeated(64, 15_000_000)), 1, "the row has 150000"),
    "page.parquet": (lambda: parquet(repeated(1, 250_000_000)), 1, "decoding the row takes at least 2500000"),
    "nulls.parquet": (lambda: parquet(pa.array([[None] * 2_000_000], pa.list_(pa.int8()))), 1, "values"),
    "equal.arrow": (lambda: arrow(repeated(64, 15_000_000)), 1, "the row has 150000"),
    "body.arrow": (lambda: arrow(pa.array(["x" * 250_000_000])), 1, "decoding the row takes at least 2500000"),
    "nulls.arrow": (lambda: arrow(pa.FixedSizeListArray.from_arrays(pa.nulls(10**9), 10**9)), 1, "values"),
    "copy.parquet.gz": (lambda: text("PAR1", "x", "PAR1"), None, "the decompressed file has more than"),
    "line.csv.gz": (lambda: text("a\n", "x", "\nsmall\n"), 2, f"the row has {LONG * MEGABYTE + 1} bytes"),
    "lines.csv.gz": (lambda: text("a\n", '"' + "x" * 29 + '\n",', "", 20), 2, "bytes"),
    "fields.csv.gz": (lambda: text("a\n", ",", "\nsmall\n", 7), 2, "values"),
    "line.jsonl.gz": (lambda: text('{"a": "', "x", '"}\n' + LINE), 1, f"the row has {LONG * MEGABYTE + 10} bytes"),
    "line.jsonl.xz": (lambda: text('{"a": "', "x", '"}\n' + LINE), 1, f"the row has {LONG * MEGABYTE + 10} bytes"),
    "window.jsonl.xz": (lambda: large_window, None, "Memory usage limit"),
    "values.jsonl.gz": (lambda: text('{"a": [[]', ",[]", "]}\n" + LINE, 7), 1, "values"),
    "text.json.gz": (lambda: text('[{"a": "', "x", '"}]'), 1, "bytes"),
    "key.json.gz": (lambda: text('{"', "x", '": 1}'), 1, "bytes"),
    "values.json.gz": (lambda: text('[{"a": [[]', ",[]", "]}]", 7), 1, "values"),
    "first.json.gz": (lambda: text('{"a": 1, "b": "', "x", '"}'), 1, "bytes"),
}
"""Writer of each file, number of the first row that is refused, and its reason."""


@pytest.mark.security
def test_a_small_file_of_large_rows_is_refused_in_bounded_memory(tmp_path, subtests):
    paths = [tmp_path / name for name in BOMBS]
    for path, (write, _, _) in zip(paths, BOMBS.values(), strict=True):
        write()(path)
    for path, result, (_, row, reason) in zip(paths, read(paths), BOMBS.values(), strict=True):
        with subtests.test(path.name):
            place = f"{path}:{row}: " if row is not None else str(path)
            assert result["problems"][0].startswith(place)
            assert reason in result["problems"][0]
            assert max(result["megabytes"]) <= MEMORY


def test_rows_behind_a_row_that_is_too_large_are_read(tmp_path):
    """Batches that exceed the memory are decoded row by row, and rows keep their numbers."""
    large = ["x" * (ROW_BYTES + 1), "x" * ROW_BYTES]
    content = [*["small"] * 1500, *large * 20, *["small"] * 20]
    pq.write_table(pa.table({"a": content}), tmp_path / "a.parquet", row_group_size=1400)
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), pa.schema([("a", pa.string())])) as stream:
        stream.write_table(pa.table({"a": content}), max_chunksize=1400)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"a": value}) + "\n" for value in content))
    fitting = [number for number, value in enumerate(content, 1) if len(value) == 5]
    for suffix in ("parquet", "arrow", "jsonl"):
        broken: list[BrokenRow] = []
        source = SourceSpec(path=str(tmp_path / f"a.{suffix}"))
        assert [row.number for row in rows(source, broken.append)] == fitting
        assert [row.number for row in broken] == list(range(1501, 1541))
