"""Files of the training service that nothing needs, for `flows.runs clean`.

A session is over when it is finished, when its client has sent nothing for `SILENT_DAYS`, or when the records of all
its models were forgotten. Then its requests, results and sampling sessions are not needed. A state is needed while it
is that of a model or of a sampling session whose session is not over, or of a checkpoint. A checkpoint is needed until
it expires, is deleted, or the record of its model is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from components.json_text import read_json
from flows.train_service.checkpoints import expired
from flows.train_service.sessions import FILE, session_of

FOLDER = "train_service"
"""Folder of the service below the root."""
LOCK = ".lock"
"""File that the running service locks."""
SILENT_DAYS = 7.0
"""Days without a heartbeat after which a client will not come back; they send one every few seconds."""


@dataclass(frozen=True)
class Unneeded:
    """File or folder that nothing needs."""

    path: Path
    kind: str
    why: str


def unneeded(folder: Path, recorded: Collection[str]) -> Iterator[Unneeded]:
    """Yield what nothing needs below the folder of a service that does not run. recorded: ids of the recorded runs."""
    models = {path: read_json(path) for path in sorted((folder / "models").glob("*.json"))}
    forgotten = {path: data for path, data in models.items() if data["run"] not in recorded}
    for path, data in forgotten.items():
        for lost in (path, folder / "checkpoints" / data["id"]):
            if lost.exists():
                yield Unneeded(lost, "model of a client", "its run was forgotten")
    needed: set[str | None] = set()
    for session in sorted((folder / "sessions").glob("*/")):
        states = {path: data["state"] for path, data in models.items() if session_of(data["id"]) == session.name}
        if why := _over(session) or ("its runs were forgotten" if states and states.keys() <= forgotten.keys() else ""):
            yield Unneeded(session, "requests of a client", why)
            continue
        needed |= {state for path, state in states.items() if path not in forgotten}
        needed |= {read_json(path)["state"] for path in session.glob("samplers/*.json")}
    names = {data["id"] for path, data in models.items() if path not in forgotten}
    for path in (path for name in sorted(names) for path in (folder / "checkpoints" / name).glob("*/*.json")):
        if expired(data := read_json(path)):
            yield Unneeded(path, "checkpoint of a client", "it has expired")
        else:
            needed.add(data["state"])
    for state in sorted((folder / "states").glob("*/")):
        if state.name not in needed:
            yield Unneeded(state, "state of a client's model", "no model, checkpoint or sampling session needs it")


def _over(session: Path) -> str:
    """Return the reason why a session is over; empty if its client may continue."""
    file = session / FILE
    if not file.is_file() or "finished" in read_json(file):
        return "its session is finished"
    silent = time.time() - file.stat().st_mtime > SILENT_DAYS * 86400
    return f"its client has sent nothing for {SILENT_DAYS:g} days" if silent else ""
