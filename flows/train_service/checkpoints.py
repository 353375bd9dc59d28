"""Checkpoints of models: names of their states, with a time to live.

MODEL/weights/NAME.json   MODEL/sampler_weights/NAME.json
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from components.errors import SpecError
from components.json_text import read_json, write_json
from flows.train_service.bodies import SaveForSampler, SaveWeights

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Kinds of checkpoints: the part of the path, and the API's name."""


class Checkpoints:
    """Checkpoints below a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def save(self, model: str, kind: str, asked: SaveWeights | SaveForSampler, content: dict[str, Any]) -> str:
        """Save a checkpoint of a model; return its path. content: base, adapter's configuration and key of the state.
        Raises SpecError for a name that another state has."""
        assert asked.path is not None
        path, file = f"{SCHEME}{model}/{kind}/{asked.path}", self._file(model, kind, asked.path)
        if file.is_file() and not asked.overwrite and read_json(file)["state"] != content["state"]:
            raise SpecError.at("path", f"{asked.path!r} exists; expected another name, or overwrite = true")
        data = {"path": path, "model": model, "kind": kind, "created": time.time(), "metadata": asked.user_metadata}
        write_json(file, content | data | _expiry(asked.ttl_seconds))
        return path

    def get(self, path: str) -> dict[str, Any]:
        """Return a checkpoint. Raises HTTPException if it does not exist."""
        data: dict[str, Any] = read_json(self._existing(path))
        return data

    def set_lifetime(self, path: str, seconds: int | None) -> None:
        """Let a checkpoint expire after some seconds, or never. Raises HTTPException if it does not exist."""
        write_json(self._existing(path), self.get(path) | _expiry(seconds))

    def delete(self, path: str) -> None:
        """Delete a checkpoint; its state remains. Raises HTTPException if it does not exist."""
        self._existing(path).unlink()

    def listed(self, model: str = "*") -> list[dict[str, Any]]:
        """Return the checkpoints of a model, or of all models, that have not expired in the form of the API, the latest
        first."""
        saved = [read_json(file) for file in self._folder.glob(f"{model}/*/*.json")]
        return [
            {
                "checkpoint_id": data["path"].removeprefix(f"{SCHEME}{data['model']}/"),
                "checkpoint_type": KINDS[data["kind"]],
                "time": date(data["created"]),
                "tinker_path": data["path"],
                "user_metadata": data["metadata"],
                "expires_at": data["expires"] and date(data["expires"]),
            }
            for data in sorted(saved, key=lambda data: -data["created"])
            if not expired(data)
        ]

    def _existing(self, path: str) -> Path:
        """Return the file of a checkpoint."""
        model, _, tail = path.removeprefix(SCHEME).partition("/")
        kind, _, name = tail.partition("/")
        if is_id(model) and kind in KINDS and 0 < len(name) <= 128:
            file = self._file(model, kind, name)
            if file.is_file() and not expired(read_json(file)):
                return file
        raise HTTPException(404, f"no checkpoint {path!r:.200}: it was never saved, was deleted, or has expired")

    def _file(self, model: str, kind: str, name: str) -> Path:
        return self._folder / model / kind / f"{name.replace('/', '%2F')}.json"


def _expiry(seconds: int | None) -> dict[str, float | None]:
    return {"expires": None if seconds is None else time.time() + seconds}


def expired(data: dict[str, Any]) -> bool:
    """Return True for a checkpoint whose time to live has ended."""
    return bool(data["expires"] and data["expires"] < time.time())


def is_id(text: str) -> bool:
    """Return True for a text in the form of ids, which become names of files."""
    return 0 < len(text) <= 200 and all(part.isalnum() and part.isascii() for part in text.split(":"))


def date(seconds: float) -> str:
    """Return a time since the epoch in the form of the API."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
