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

    def save(
        self,
        model: str,
        kind: str,
        asked: SaveWeights | SaveForSampler,
        content: dict[str, Any],
        *,
        overwrite: bool = True,
    ) -> str:
        """Save a checkpoint of a model; return its path. content: base, adapter's configuration and key of the state.
        Raises SpecError for a name that another state has."""
        assert asked.path is not None
        path, file = f"{SCHEME}{model}/{kind}/{asked.path}", self._file(model, kind, asked.path)
        if file.is_file() and not overwrite and read_json(file)["state"] != content["state"]:
            raise SpecError.at("path", f"{asked.path!r} exists; expected another name, or overwrite = true")
        now = time.time()
        expires = now + asked.ttl_seconds if asked.ttl_seconds else None
        write_json(file, {**content, "path": path, "created": now, "expires": expires, "metadata": asked.user_metadata})
        return path

    def get(self, path: str) -> dict[str, Any]:
        """Return a checkpoint. Raises HTTPException if it does not exist."""
        file = self._located(path)
        data = read_json(file) if file is not None and file.is_file() else None
        if data is None or _expired(data):
            raise HTTPException(404, f"no checkpoint {path!r:.200}: it was never saved, was deleted, or has expired")
        return dict(data)

    def delete(self, path: str) -> None:
        """Delete a checkpoint; its state remains. Raises HTTPException if it does not exist."""
        self.get(path)
        file = self._located(path)
        assert file is not None
        file.unlink()

    def of_model(self, model: str) -> list[dict[str, Any]]:
        """Return the checkpoints of a model that have not expired in the form of the API, the latest last."""
        files = [(kind, file) for kind in KINDS for file in (self._folder / model / kind).glob("*.json")]
        listed = [(data["created"], kind, data) for kind, file in files if not _expired(data := read_json(file))]
        return [
            {
                "checkpoint_id": data["path"].partition(f"{model}/")[2],
                "checkpoint_type": KINDS[kind],
                "time": date(created),
                "tinker_path": data["path"],
                "user_metadata": data["metadata"],
                "expires_at": data["expires"] and date(data["expires"]),
            }
            for created, kind, data in sorted(listed, key=lambda entry: entry[0])
        ]

    def _located(self, path: str) -> Path | None:
        """Return the file of a checkpoint; None for a path of another form."""
        model, _, tail = path.removeprefix(SCHEME).partition("/")
        kind, _, name = tail.partition("/")
        return self._file(model, kind, name) if is_id(model) and kind in KINDS and 0 < len(name) <= 128 else None

    def _file(self, model: str, kind: str, name: str) -> Path:
        return self._folder / model / kind / f"{name.replace('/', '%2F')}.json"


def _expired(data: dict[str, Any]) -> bool:
    return bool(data["expires"] and data["expires"] < time.time())


def is_id(text: str) -> bool:
    """Return True for a text in the form of ids, which become names of files."""
    return 0 < len(text) <= 200 and all(part.isalnum() and part.isascii() for part in text.split(":"))


def date(seconds: float) -> str:
    """Return a time since the epoch in the form of the API."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
