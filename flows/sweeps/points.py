"""One point of a sweep: run it, and note what became of it.

The notes, one JSON file a point in `<folder of the sweep>/points/`, are what the summary and the Optuna sweeper read.
They work with every launcher, also where a point's process dies: its note then still says `running`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from components.json_text import read_json
from flows.terminal.exit_codes import told
from flows.terminal.overrides import mask_overrides

FOLDER = "points"
ENDED = ("finished", "pruned")
"""States of points that are not tried again."""
Status = Literal["running", "finished", "pruned", "failed", "interrupted"]


@dataclass
class Point:
    """What became of one point."""

    number: int
    """Its place in the sweep; in a study of Optuna the number of the trial."""
    overrides: list[str]
    """What it was composed from; secrets are masked."""
    status: Status = "running"
    """`running` where it goes on, or its process died."""
    code: int = 0
    """The exit code that the point alone would have had."""
    error: str = ""
    """Why it failed."""
    result: dict[str, Any] | None = None
    """The result line of its run; None where it has none."""
    seconds: float = 0.0

    def value(self, metric: str) -> float | None:
        """A number of the result line; None where there is none."""
        found = (self.result or {}).get(metric)
        return float(found) if isinstance(found, int | float) and math.isfinite(found) else None

    def write(self, folder: Path) -> None:
        """Replaces the note, all at once."""
        path = folder / FOLDER / f"{self.number:04}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(path)


def read(folder: Path) -> list[Point]:
    """The points of a sweep by number, but for those that did not end and were tried again."""
    found = [Point(**read_json(path)) for path in sorted((folder / FOLDER).glob("*.json"))]
    last = {tuple(point.overrides): point.number for point in sorted(found, key=lambda point: point.number)}
    return sorted(
        (one for one in found if one.status in ENDED or one.number == last[tuple(one.overrides)]),
        key=lambda point: point.number,
    )


def attempt(
    folder: Path, number: int, overrides: Sequence[str], run: Callable[[], Mapping[str, Any]], metric: str
) -> float:
    """Runs a point, notes what became of it and returns its `metric`; NaN where it failed, so that the others go on.

    run: returns the result line. Raises KeyboardInterrupt only.
    """
    point = Point(number, mask_overrides(overrides))
    point.write(folder)
    start = time.monotonic()
    try:
        point.result = dict(run())
        point.status = "pruned" if point.result.get("pruned") else "finished"
    except KeyboardInterrupt:
        point.status, point.code = "interrupted", 130
        raise
    except Exception as error:  # noqa: BLE001  whatever ends one point, the others go on
        found = told(error)
        if found is None:
            traceback.print_exc()
            found = f"{type(error).__name__}: {error}", 1
        point.status, (point.error, point.code) = "failed", found
        print(f"point {number} failed: {point.error}", file=sys.stderr)
    finally:
        point.seconds = round(time.monotonic() - start, 2)
        point.write(folder)
    value = point.value(metric)
    return math.nan if value is None else value
