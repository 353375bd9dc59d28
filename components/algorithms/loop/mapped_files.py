"""Rows of a training in Arrow files that are mapped into memory: each process writes those of its own share of the
episodes, and all processes map all files. So each episode is decoded and checked by one process, and what a process
has mapped is shared with the others and does not count as its own memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.algorithms.loop import distributed
from components.errors import ResourceError
from components.trajectories.schema import Trajectory
from components.trajectories.streamed import share


def write_share(folder: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]], per_batch: int) -> list[Path]:
    """Write the rows of this process, `per_batch` in memory at a time, and return the files of all processes, which
    must all call this. A resumed training writes them again. Raises ResourceError if a file is not on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{rank}.arrow" for rank in range(distributed.size())]
    own = files[rank := distributed.rank()]
    own.unlink(missing_ok=True)  # not overwritten: an earlier attempt in this process may have mapped it
    remaining = iter(rows)
    with pa.OSFile(str(own), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        while batch := list(islice(remaining, per_batch)):
            file.write_batch(pa.RecordBatch.from_pylist(batch, schema))
    distributed.wait()
    if missing := [file for file in files if not file.exists()]:
        raise ResourceError(
            f"rank {rank} does not find {missing[0]}, which another process wrote. All processes must read the same "
            "scratch folder: put it on a shared disk"
        )
    return files


def open_mapped(file: Path) -> pa.ipc.RecordBatchFileReader:
    """Return a reader of batches that lie in the mapped file."""
    return pa.ipc.open_file(pa.memory_map(str(file)))


def own_share(episodes: Sequence[Trajectory]) -> Iterable[tuple[int, Trajectory]]:
    """Return the episodes that this process reads, with their positions."""
    return share(episodes, distributed.rank(), distributed.size())
