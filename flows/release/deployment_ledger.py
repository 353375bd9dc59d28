"""Ledger of a model's deployments below a run root: `<root>/deployments/NAME.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.artifacts import lock_file
from components.deployment.targets.base import Deployment, Release
from components.json_text import read_json, write_json

FOLDER = "deployments"
LOCK_LIMIT = 12 * 3600.0
"""Seconds to wait for another run that deploys the same model."""


@dataclass(frozen=True)
class ActiveRelease:
    """Release and its deployment."""

    release: Release
    deployment: Deployment


class Ledger:
    """Active deployment of one model below a run root, and the history of its deployments."""

    def __init__(self, root: Path, name: str):
        self.name = name
        self.folder = root / FOLDER
        self.path = self.folder / f"{name}.json"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock for deploying this model. Raises WaitTimeout after `LOCK_LIMIT` seconds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f".{self.name}.lock", "a+") as file:
            lock_file(file, f"the deployment of {self.name}", LOCK_LIMIT)
            yield

    def active(self) -> ActiveRelease | None:
        """Return the active release recorded below this root, or None."""
        entry = self._read().get("present")
        if entry is None:
            return None
        release = Release(**{**entry["release"], "folder": Path(entry["release"]["folder"])})
        return ActiveRelease(release, Deployment(**entry["deployment"]))

    def write(self, active: ActiveRelease | None, state: str, text: str) -> None:
        """Write the ledger atomically. state, text: event to append to the history."""
        data = self._read()
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "state": state, "text": text}
        data["history"] = [*data.get("history", []), entry]
        data["present"] = json.loads(json.dumps(asdict(active), default=str)) if active else None
        write_json(self.path, data)

    def _read(self) -> dict[str, Any]:
        return read_json(self.path) if self.path.is_file() else {}


def ledgers(root: Path) -> list[Ledger]:
    """Return the ledgers of all models deployed below `root`."""
    return [Ledger(root, path.stem) for path in sorted((root / FOLDER).glob("*.json"))]


def where(deployment: Deployment) -> str:
    """Return the deployment's address as text."""
    return f"{deployment.url} as {deployment.model}" if deployment.url else f"{deployment.target} {deployment.model}"
