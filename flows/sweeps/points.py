"""Points of a sweep: running one and recording its outcome.

Each point has a JSON file in `<folder of the sweep>/points/`, which the summary and the Optuna sweeper read. The files
work with every launcher. If a point's process dies, its file still has the status `running`.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from components.json_text import read_json, write_json
from flows.terminal.exit_codes import describe_error
from flows.terminal.overrides import mask_overrides

FOLDER = "points"
ENDED = ("finished", "pruned")
"""Statuses of points that are not retried."""
Status = Literal["running", "finished", "pruned", "failed", "interrupted"]


@dataclass
class Point:
    """Outcome of one point of a sweep."""

    number: int
    """Index in the sweep; in an Optuna study the number of the trial."""
    overrides: list[str]
    """Overrides of its command line, with secrets masked."""
    status: Status = "running"
    """`running` while it runs, and after its process died."""
    code: int = 0
    """Exit code that `flows.run` would have returned for this point."""
    error: str = ""
    """Error message; empty if there was no error."""
    result: dict[str, Any] | None = None
    """Result line of its run; None without one."""
    seconds: float = 0.0
    """Duration."""

    def value(self, metric: str) -> float | None:
        """Return a finite number of the result line, or None if there is none."""
        number = (self.result or {}).get(metric)
        return float(number) if isinstance(number, int | float) and math.isfinite(number) else None

    def write(self, folder: Path) -> None:
        """Write the point's file atomically."""
        write_json(folder / FOLDER / f"{self.number:04}.json", asdict(self))


def read(folder: Path) -> list[Point]:
    """Return the points of a sweep by number, without those that failed and were retried."""
    points = [Point(**read_json(path)) for path in sorted((folder / FOLDER).glob("*.json"))]
    last = {tuple(point.overrides): point.number for point in sorted(points, key=lambda point: point.number)}
    return sorted(
        (point for point in points if point.status in ENDED or point.number == last[tuple(point.overrides)]),
        key=lambda point: point.number,
    )


def attempt(
    folder: Path, number: int, overrides: Sequence[str], run: Callable[[], Mapping[str, Any]], metric: str
) -> float:
    """Run a point, record its outcome and return its `metric`; NaN if it failed, so that the other points still run.

    run: function that returns the result line. Raises KeyboardInterrupt only.
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
    except Exception as error:  # noqa: BLE001  an error of one point must not stop the others
        message_and_code = describe_error(error)
        if message_and_code is None:
            traceback.print_exc()
            message_and_code = f"{type(error).__name__}: {error}", 1
        point.status, (point.error, point.code) = "failed", message_and_code
        print(f"point {number} failed: {point.error}", file=sys.stderr)
    finally:
        point.seconds = round(time.monotonic() - start, 2)
        point.write(folder)
    value = point.value(metric)
    return math.nan if value is None else value
