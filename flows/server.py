"""The Prefect server of a run.

With `PREFECT_API_URL` set, that server is used and none is started. Else a run starts its own, on a free port of this
machine, with its database in `<root>/prefect`, so `prefect server start` on that folder later shows every run. It is
Prefect's own application under uvicorn, in a process of its own, started first of all and awaited last: it boots while
the flow imports what it needs. Left out is what a run does not need: the user interface and its files, the
scheduler and its kin, block types, usage statistics. The database is migrated once, under a lock.

The server ends with the run, also when that is killed: it watches a pipe that the run holds.

`flows.serve` starts a whole one: on a port that it names, with the user interface, the scheduler and the rest.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from components.artifacts import lock_file
from components.compute.lifeline import watch_parent
from components.compute.runners import end
from components.errors import ResourceError, WaitTimeout
from components.tracking.provenance import command_path

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"

START_LIMIT = 180.0
"""Seconds that a server may take to answer; the first start on a slow disk takes the longest."""

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",  # the run has its own log file
    "PREFECT_CLI_PROMPT": "false",
}
"""Environment of client and server alike."""


ANSWER_LIMIT = 10.0
"""Seconds that a server of the user may take to answer."""


def home(root: Path) -> Path:
    """Folder of Prefect's data below a run root."""
    return root / "prefect"


def client_environment(root: Path) -> dict[str, str]:
    """Variables to set before Prefect is imported, where the run has a server of its own."""
    return {"PREFECT_HOME": str(home(root)), "PREFECT_PROFILES_PATH": str(home(root) / "profiles.toml"), **QUIET}


class Api(Protocol):
    """The Prefect server that a run uses."""

    ui_command: str
    """The command that shows the runs in a browser."""

    def url(self) -> str:
        """The API's address, once it answers."""
        ...

    def kill(self) -> None:
        """Ends at once what was started for the run."""
        ...


class UserServer:
    """The server that PREFECT_API_URL names. Raises ResourceError where it does not answer."""

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self.ui_command = f"open {self._url.removesuffix('/api')}"
        try:
            urllib.request.urlopen(f"{self._url}/health", timeout=ANSWER_LIMIT).close()
        except urllib.error.HTTPError as error:
            error.close()  # it answers; whether it lets us in is Prefect's to say
        except (OSError, ValueError) as error:
            raise ResourceError(
                f"PREFECT_API_URL={url}: no Prefect server answers there ({error}). Start it, correct the variable, or "
                "unset it, and the run starts a server of its own"
            ) from None

    def url(self) -> str:
        return self._url

    def kill(self) -> None:
        """It is not ours."""


class Server:
    """A server of our own that boots in the background. Make it with `start`."""

    def __init__(self, process: subprocess.Popen, root: Path, log: Path):
        self.ui_command = f"PREFECT_HOME={home(root)} {command_path('prefect')} server start"
        self._process = process
        self._log = log
        self._url: str | None = None
        self._started = time.monotonic()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def url(self) -> str:
        """The API's address, once the server answers. Raises ResourceError where it ended instead, WaitTimeout after
        `START_LIMIT` seconds; both say where its log is."""
        if self._url is None:
            assert self._process.stdout is not None
            left = max(0.0, START_LIMIT - (time.monotonic() - self._started))
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise WaitTimeout(f"waited {START_LIMIT:.0f} s for the Prefect server to start; its log is {self._log}")
            line = self._process.stdout.readline()
            if not line:
                raise ResourceError(f"the Prefect server ended while it started; its log is {self._log}")
            self._url = str(json.loads(line)["url"])
            logger.debug("Prefect server at %s after %.1f s", self._url, time.monotonic() - self._started)
        return self._url

    def stop(self) -> None:
        """Ends the server; it writes down first what it was told."""
        end(self._process)

    def kill(self) -> None:
        self._process.kill()


_kept: dict[Path, Server] = {}
"""Servers that stay up for the next run of a sweep, by run root; they end with the process."""


@contextmanager
def for_run(root: Path, *, keep: bool = False) -> Iterator[Api]:
    """The server for one run below `root`: the user's, or one of our own, which ends with the run, or with `keep` when
    the process ends. Sets the environment that Prefect is to be imported in; call `url` when it is needed."""
    os.environ.setdefault("DO_NOT_TRACK", "1")
    if url := os.environ.get("PREFECT_API_URL"):
        yield UserServer(url)
        return
    os.environ.update(client_environment(root))
    server = _kept.pop(root, None)
    if server is None or not server.alive:
        server = start(root)
    if keep:
        _kept[root] = server
        atexit.register(server.stop)
        yield server
        return
    try:
        yield server
    finally:
        server.stop()


def start(root: Path, port: int | None = None) -> Server:
    """Starts a server on the data below `root` and returns at once. port: a whole server, with the user interface, on
    this port; raises ResourceError where it is taken. None: what a run needs, on a free one."""
    if port is not None:
        _free(port)
    log = root / "logs" / "prefect-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    home(root).mkdir(parents=True, exist_ok=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"},
        **client_environment(root),
        "PREFECT_SERVER_UI_ENABLED": "false" if port is None else "true",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home(root) / "ui"),
        "PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{port or 0}/api",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
        "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
    }
    with open(log, "ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.server", "--root", str(root), *(["--port", str(port)] if port else [])],
            cwd=Path(__file__).resolve().parent.parent,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the run, which ends us when it has said its last word
        )
    return Server(process, root, log)


def _free(port: int) -> None:
    """Raises ResourceError where the port is taken."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ResourceError(
            f"--port {port}: nothing can listen there ({reason}). Choose another port; or, where it is a Prefect "
            f"server, use it: PREFECT_API_URL=http://{HOST}:{port}/api"
        ) from None


def main() -> None:
    """The server's process: prints one JSON line with its address when it answers, and ends with its standard input."""
    parser = argparse.ArgumentParser(prog="python -m flows.server")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    root, port = arguments.root, arguments.port
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    listener = socket.create_server((HOST, port or 0))
    serving: list[uvicorn.Server] = []

    def leave() -> None:
        if not serving:  # it still boots, or waits for another one that migrates
            os._exit(1)
        serving[0].should_exit = True

    watch_parent(on_end=leave)
    with _migrated(root) as ready:
        import uvicorn
        from prefect.server.api.server import create_app

        config = uvicorn.Config(
            create_app(ephemeral=port is None), log_level="warning", access_log=False, lifespan="on"
        )
        server = uvicorn.Server(config)
        startup = server.startup

        async def announced(sockets: list[socket.socket] | None = None) -> None:
            await startup(sockets)
            if server.started:
                serving.append(server)
                ready()
                print(json.dumps({"url": f"http://{HOST}:{listener.getsockname()[1]}/api"}), file=out)

        server.startup = announced  # type: ignore[method-assign]  # uvicorn has no hook for this
        server.run([listener])


@contextmanager
def _migrated(root: Path) -> Iterator[Callable[[], None]]:
    """Sees to it that one process migrates the database and the others wait. Gives a function to be called when the
    server is up, which is when the migration is done."""
    marker = home(root) / ".migrated"
    version = metadata.version("prefect")

    def current() -> bool:
        return marker.is_file() and marker.read_text() == version and (home(root) / "prefect.db").is_file()

    with open(home(root) / ".lock", "a+") as lock:
        if not current():
            lock_file(lock, "Prefect's database", START_LIMIT)
        if current():
            os.environ["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] = "false"
            fcntl.flock(lock, fcntl.LOCK_UN)

        def ready() -> None:
            marker.write_text(version)
            fcntl.flock(lock, fcntl.LOCK_UN)

        yield ready


if __name__ == "__main__":
    main()
