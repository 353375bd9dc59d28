"""What is in use of a model, below a run root: `<root>/deployments/NAME.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.artifacts import lock_file
from components.deployment.targets.protocol import Deployment, Release
from components.json_text import read_json

FOLDER = "deployments"
LOCK_LIMIT = 12 * 3600.0
"""Seconds to wait for another run that deploys the same model."""


@dataclass(frozen=True)
class InUse:
    """A release and where it was deployed."""

    release: Release
    deployment: Deployment


class Ledger:
    """What is in use of one model below a run root, and what was tried."""

    def __init__(self, root: Path, name: str):
        self.name = name
        self.folder = root / FOLDER
        self.path = self.folder / f"{name}.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """While nobody else deploys this model. Raises WaitTimeout after half a day."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f".{self.name}.lock", "a+") as file:
            lock_file(file, f"the deployment of {self.name}", LOCK_LIMIT)
            yield

    def present(self) -> InUse | None:
        """What is in use, as far as this root knows."""
        found = self._read().get("present")
        if found is None:
            return None
        release = found["release"]
        return InUse(Release(**{**release, "folder": Path(release["folder"])}), Deployment(**found["deployment"]))

    def write(self, present: InUse | None, state: str, text: str) -> None:
        """All at once. state, text: what happened, added to the history."""
        data = self._read()
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "state": state, "text": text}
        data["history"] = [*data.get("history", []), entry]
        data["present"] = json.loads(json.dumps(asdict(present), default=str)) if present else None
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.part")
        part.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(self.path)

    def _read(self) -> dict[str, Any]:
        return read_json(self.path) if self.path.is_file() else {}


def ledgers(root: Path) -> list[Ledger]:
    """Of all models that were deployed below `root`."""
    return [Ledger(root, path.stem) for path in sorted((root / FOLDER).glob("*.json"))]


def where(deployment: Deployment) -> str:
    """Its address, in words."""
    return f"{deployment.url} as {deployment.model}" if deployment.url else f"{deployment.target} {deployment.model}"
