"""Comparison of the contents of two artifacts, file by file, up to a tolerance for floating-point numbers.

Numbers of JSON and Parquet files agree if they differ by at most `ABSOLUTE + RELATIVE · |recorded|`. Tensors agree if
the L2 norm of their difference is at most `TENSOR_RELATIVE` of the norm of the recorded tensor. Text, integers (token
ids) and all other files must be equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.artifacts import Artifact

RELATIVE = 1e-3
ABSOLUTE = 1e-4
TENSOR_RELATIVE = 1e-3
BATCH = 256
"""Rows of a Parquet file that are compared at a time."""


@dataclass(frozen=True)
class ContentDifference:
    """Largest deviation of two artifacts, or the first place where they differ beyond the tolerance."""

    largest: float = 0.0
    """Largest relative deviation of numbers and tensors, where they agree."""
    place: str = ""
    """First place that differs beyond the tolerance, with both values; empty if there is none."""


def compare_contents(recorded: Artifact, recomputed: Artifact, names: Mapping[str, Any]) -> ContentDifference:
    """Compare the files `names` of two artifacts, except volatile ones."""
    largest = 0.0
    for name in sorted(set(names) - set(recorded.volatile)):
        paths = recorded.path / name, recomputed.path / name
        if not paths[1].is_file():
            return ContentDifference(largest, f"{name}: missing")
        try:
            for deviation in _deviations(*paths):
                largest = max(largest, deviation)
        except _Differs as difference:
            return ContentDifference(largest, f"{name}{difference}")
    return ContentDifference(largest)


class _Differs(Exception):
    """Place that differs beyond the tolerance."""


def _deviations(recorded: Path, recomputed: Path) -> Iterator[float]:
    """Yield relative deviations. Raises _Differs at the first place beyond the tolerance."""
    if recorded.suffix == ".safetensors":
        yield from _tensor_deviations(recorded, recomputed)
    elif recorded.suffix == ".parquet":
        yield from _row_deviations(recorded, recomputed)
    elif recorded.suffix == ".json":
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (recorded, recomputed))
        yield from _value_deviations(before, after, "")
    elif recorded.read_bytes() != recomputed.read_bytes():
        raise _Differs(": other bytes")


def _tensor_deviations(recorded: Path, recomputed: Path) -> Iterator[float]:
    from safetensors import safe_open

    with safe_open(recorded, "pt") as old, safe_open(recomputed, "pt") as new:
        if set(old.keys()) != set(new.keys()):
            raise _Differs(": other tensors")
        for name in sorted(old.keys()):
            before, after = old.get_tensor(name).double(), new.get_tensor(name).double()
            if before.shape != after.shape:
                raise _Differs(f": {name} has shape {list(after.shape)}, recorded {list(before.shape)}")
            norm = float(before.norm())
            deviation = float((after - before).norm()) / norm if norm else float(after.norm())
            if not deviation <= TENSOR_RELATIVE:
                raise _Differs(f": {name} differs by {deviation:.2g} of its norm")
            yield deviation


def _row_deviations(recorded: Path, recomputed: Path) -> Iterator[float]:
    import pyarrow.parquet as parquet

    old, new = parquet.ParquetFile(recorded), parquet.ParquetFile(recomputed)
    counts = old.metadata.num_rows, new.metadata.num_rows
    if counts[0] != counts[1]:
        raise _Differs(f": {counts[1]} rows, recorded {counts[0]}")
    start = 0
    for before, after in zip(old.iter_batches(BATCH), new.iter_batches(BATCH), strict=True):
        if not before.equals(after):
            for index, rows in enumerate(zip(before.to_pylist(), after.to_pylist(), strict=True), start):
                yield from _value_deviations(*rows, f": row {index}")
        start += before.num_rows


def _value_deviations(recorded: Any, recomputed: Any, place: str) -> Iterator[float]:
    """Yield the relative deviations of two JSON values."""
    if isinstance(recorded, Mapping) and isinstance(recomputed, Mapping) and recorded.keys() == recomputed.keys():
        for name, value in recorded.items():
            yield from _value_deviations(value, recomputed[name], f"{place} {name}")
    elif isinstance(recorded, list) and isinstance(recomputed, list) and len(recorded) == len(recomputed):
        for index, pair in enumerate(zip(recorded, recomputed, strict=True)):
            yield from _value_deviations(*pair, f"{place}[{index}]")
    elif isinstance(recorded, float) and isinstance(recomputed, float):
        if not (recorded == recomputed or (math.isnan(recorded) and math.isnan(recomputed))):
            deviation = abs(recomputed - recorded)
            if not deviation <= ABSOLUTE + RELATIVE * abs(recorded):
                raise _Differs(f"{place}: {recomputed:.6g}, recorded {recorded:.6g}")
            yield deviation / max(abs(recorded), ABSOLUTE)
    elif recorded != recomputed:
        raise _Differs(f"{place}: {_short(recomputed)}, recorded {_short(recorded)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
