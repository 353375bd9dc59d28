"""Background jobs of an agent: runs and evaluations, each a process below a supervisor.

A job has an id of its own, because a run gets its id only once tracking starts. Jobs end with the server
(`flows.agent_tools.supervisor`); the same call resumes a run from its finished stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.errors import ResourceError
from components.redaction import mask_text
from flows.agent_tools import supervisor
from flows.agent_tools.commands import command, error_message, last_object
from flows.execution.executor import environment

POLL = 0.2
"""Seconds between two looks at a job."""
MOST_LOG = 2**16
"""Maximum number of bytes of a log that an answer reads."""
LAST_LINES = 10
"""Number of lines of the error of a run that failed after its start."""
_BEGUN = "; log: "
MOST_JOBS = 200
"""Maximum number of jobs whose results are kept; the oldest finished one is forgotten."""


@dataclass
class Job:
    """A run or an evaluation in the background."""

    id: str
    name: str
    """Command: run or evaluate."""
    root: Path
    folder: Path
    supervisor: subprocess.Popen[bytes]
    pid: int
    """Process id of the command, as in the record of its run."""
    arguments: list[str]
    started: float = field(default_factory=time.time)
    ended: float | None = None
    stopped: bool = False

    @property
    def state(self) -> str:
        """running, finished, failed or stopped."""
        code = self.supervisor.poll()
        if code is None:
            return "running"
        self.ended = self.ended or time.time()
        if code == 0:
            return "finished"
        return "stopped" if self.stopped or code == supervisor.STOPPED else "failed"

    @property
    def seconds(self) -> float:
        """Duration until now or until the end."""
        return (self.ended or time.time()) - self.started

    def log(self, lines: int) -> list[str]:
        """Return the last lines of the command's log, with masked secrets."""
        return mask_text(self._end_of("stderr")).splitlines()[-lines:] if lines > 0 else []

    @property
    def begun(self) -> bool:
        """True once a run has passed its checks, which its log states, or once the job has ended."""
        return _BEGUN in self._end_of("stderr") or self.state != "running"

    def error(self) -> str | None:
        """Return the message of a failed command; None for another state."""
        if self.state != "failed":
            return None
        text = self._end_of("stderr")
        if _BEGUN in text:  # the message follows the lines of the run
            text = "\n".join(text.strip().splitlines()[-LAST_LINES:])
        return error_message(f"flows.{self.name}", text)

    def result(self) -> dict[str, Any] | None:
        """Return the object that a finished command printed; None for another state. A sweep's is that of its last
        run."""
        if self.state != "finished":
            return None
        return last_object((self.folder / "stdout").read_text("utf-8", "replace"), f"flows.{self.name}")

    def end(self) -> None:
        """Ask the supervisor to stop the command."""
        if self.state == "running":
            self.stopped = True
        if self.supervisor.stdin is not None:
            with contextlib.suppress(OSError):
                self.supervisor.stdin.close()

    async def wait(self, seconds: float) -> bool:
        """Wait for the end of the job, at most `seconds`. Return True if it has ended."""
        end = time.monotonic() + seconds
        while self.state == "running" and time.monotonic() < end:
            await asyncio.sleep(POLL)
        return self.state != "running"

    def _end_of(self, name: str) -> str:
        with open(self.folder / name, "rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - MOST_LOG, 0))
            return file.read().decode(errors="replace")


class Jobs:
    """Jobs of one server, at most `limit` of them at once."""

    def __init__(self, limit: int):
        self.limit = limit
        self._jobs: dict[str, Job] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="espalier-")

    def start(self, name: str, label: str, arguments: Sequence[str], root: Path) -> Job:
        """Start a command. Raises ResourceError if `limit` jobs are running. label: beginning of the id."""
        running = [job.id for job in self._jobs.values() if job.state == "running"]
        if len(running) >= self.limit:
            raise ResourceError(
                f"{', '.join(running)}: running, and at most {self.limit} may run at once (--limit of the server); "
                "wait for the end (status with wait_seconds) or stop it"
            )
        identifier = f"{label}-{secrets.token_hex(3)}"
        folder = Path(self._folder.name) / identifier
        folder.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-m", supervisor.__name__, str(folder), *command(name, arguments)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # signals to the server and its group do not reach it
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        if not first.strip():
            raise ResourceError(f"flows.{name} cannot be started; the server's log has the reason")
        job = self._jobs[identifier] = Job(identifier, name, root, folder, process, int(first), list(arguments))
        self._forget()
        return job

    def get(self, identifier: str) -> Job:
        """Return a job. Raises ResourceError for an unknown one."""
        if identifier not in self._jobs:
            jobs = ", ".join(self._jobs) or "none yet"
            raise ResourceError(mask_text(f"{identifier!r:.99}: there is no such job; jobs of this server: {jobs}"))
        return self._jobs[identifier]

    def find(self, identifier: str) -> Job | None:
        """Return a job, or None for an unknown id."""
        return self._jobs.get(identifier)

    def close(self) -> None:
        """Stop all jobs; their supervisors end them."""
        for job in self._jobs.values():
            job.end()
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _forget(self) -> None:
        finished = [job.id for job in self._jobs.values() if job.state != "running"]
        for identifier in finished[: max(len(self._jobs) - MOST_JOBS, 0)]:
            del self._jobs[identifier]
