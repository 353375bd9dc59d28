"""Sessions of clients and their sampling sessions, on disk.

SESSION/session.json   its time of change is that of the last heartbeat     SESSION/samplers/ID.json
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from components.json_text import read_json, write_json
from flows.train_service.bodies import CreateSession
from flows.train_service.checkpoints import is_id

FILE = "session.json"


def session_of(owner: str) -> str:
    """Return the session of a model or of a sampling session."""
    return owner.partition(":")[0]


class ClientSessions:
    """Sessions below a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def create(self, asked: CreateSession) -> str:
        """Return the id of a new session."""
        session = uuid.uuid4().hex
        self._write(session, asked.model_dump(exclude={"type"}) | {"created": time.time()})
        return session

    def get(self, session: str) -> dict[str, Any]:
        """Return a session. Raises HTTPException for one that does not exist, or is finished."""
        path = self._folder / session / FILE
        if not is_id(session) or not path.is_file():
            raise HTTPException(404, f"no session {session!r:.80}; create one")
        data: dict[str, Any] = read_json(path)
        if "finished" in data:
            raise HTTPException(410, f"the session {session} is finished; create another one")
        return data

    def ids(self) -> list[str]:
        """Return the ids of all sessions, the latest first."""
        files = sorted(self._folder.glob(f"*/{FILE}"), key=lambda file: -read_json(file)["created"])
        return [file.parent.name for file in files]

    def heartbeat(self, session: str) -> None:
        """Note that the client of a session is alive. Raises HTTPException as `get`."""
        self.get(session)
        os.utime(self._folder / session / FILE)

    def finish(self, session: str, reason: dict[str, Any]) -> None:
        """Finish a session. Raises HTTPException as `get`."""
        self._write(session, self.get(session) | {"finished": time.time(), "reason": reason})

    def add_sampler(self, sampler: str, base: str, state: str | None = None, path: str | None = None) -> None:
        """Add a sampling session. state: key of the sampled state; None for the base. path: of its checkpoint."""
        write_json(self._sampler(sampler), {"base": base, "state": state, "path": path})

    def sampler(self, sampler: str) -> dict[str, Any]:
        """Return a sampling session. Raises HTTPException if it does not exist."""
        path = self._sampler(sampler)
        if not is_id(sampler) or not path.is_file():
            raise HTTPException(404, f"no sampling session {sampler!r:.120}; create one")
        data: dict[str, Any] = read_json(path)
        return data

    def samplers(self, session: str) -> list[str]:
        """Return the ids of the sampling sessions of a session."""
        return sorted(path.stem for path in self._sampler(f"{session}:").parent.glob("*.json"))

    def _sampler(self, sampler: str) -> Path:
        return self._folder / session_of(sampler) / "samplers" / f"{sampler}.json"

    def _write(self, session: str, data: dict[str, Any]) -> None:
        write_json(self._folder / session / FILE, data)
