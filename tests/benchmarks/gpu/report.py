"""Results of the benchmark: a JSON file, rewritten after every measurement, so that a killed run keeps what it has."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

RUNNING = "running"


class Results:
    """Head of the results, and the parts by name."""

    def __init__(self, path: Path, head: dict[str, Any]):
        self.path = path
        self.content: dict[str, Any] = {**head, "seconds": 0.0, "parts": {}}
        self._earlier_seconds = 0.0
        self._began = time.monotonic()

    @classmethod
    def resumed(cls, path: Path) -> Results:
        """Return the results of a run that ended before its last part. The part in which it ended has failed."""
        results = cls(path, {})
        results.content = json.loads(path.read_text())
        results._earlier_seconds = results.content["seconds"]
        for part in results.parts.values():
            if part["status"] == RUNNING:
                part["status"] = "failed: the process ended during this part"
        return results

    @property
    def parts(self) -> dict[str, Any]:
        return self.content["parts"]

    @property
    def elapsed(self) -> float:
        """Seconds since this process began."""
        return time.monotonic() - self._began

    def write(self) -> None:
        self.content["seconds"] = round(self._earlier_seconds + self.elapsed, 1)
        draft = self.path.with_name(f".{self.path.name}.draft")
        draft.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.path)


class Report:
    """Report of one part."""

    def __init__(self, results: Results, name: str):
        self.results, self.name = results, name
        self._began = time.monotonic()
        results.parts[name] = {"status": RUNNING, "seconds": 0.0, "result": {}}
        results.write()

    @property
    def result(self) -> dict[str, Any]:
        return self.results.parts[self.name]["result"]

    def update(self, **values: Any) -> None:
        """Set values of the result, and write all results."""
        self.result.update(values)
        self.results.parts[self.name]["seconds"] = round(time.monotonic() - self._began, 1)
        self.results.write()

    def skip(self, what: str, cause: str | BaseException) -> None:
        """Report a measurement that cannot be made. The traceback of an error is logged."""
        self.result.setdefault("skipped", {})[what] = reason(what, cause) if isinstance(cause, BaseException) else cause
        self.update()

    def end(self, status: str) -> None:
        self.results.parts[self.name]["status"] = status
        self.update()


def reason(what: str, error: BaseException) -> str:
    """Return type and first line of an error, whose traceback is logged."""
    logging.getLogger(__name__).error("%s failed", what, exc_info=error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:400]}"
