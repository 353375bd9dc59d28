"""Process of a Prefect server that `flows.orchestration.server` starts: Prefect's application under uvicorn.

It prints one JSON line, `{"url"}` once it answers or `{"error"}`, and stops when its standard input closes. It listens
on the loopback address only and only answers requests with this address as Host and from its own origin. Prefect itself
requires the credential (PREFECT_SERVER_API_AUTH_STRING) and, with every change, a CSRF token.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts import lock_file
from components.compute.lifeline import watch_parent
from flows.orchestration.server import HOST, START_LIMIT, home
from flows.terminal.arguments import RootParser

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send


class LocalOnly:
    """ASGI middleware that checks the Host and Origin headers of requests and websockets.

    The check rejects pages whose host name was rebound to this address (DNS rebinding) and pages of other origins.
    Programs send no Origin header.
    """

    def __init__(self, app: ASGIApp, port: int):
        self._app = app
        names = {f"{name}:{port}" for name in (HOST, "localhost")} | ({HOST, "localhost"} if port == 80 else set())
        self._hosts = {name.encode() for name in names}
        self._origins = {f"http://{name}".encode() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (refusal := self._refusal(scope["headers"])):
            from starlette.responses import PlainTextResponse

            await PlainTextResponse(refusal, status_code=403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return "wrong Host header; expected this server's own address"
        if any(value not in self._origins for name, value in headers if name == b"origin"):
            return "wrong Origin header; expected this server's own origin"
        return None


def main() -> None:
    parser = RootParser(prog="python -m flows.orchestration.server_process", default=None)
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    root = arguments.root
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    listener = socket.create_server((HOST, arguments.port or 0))
    port = listener.getsockname()[1]
    serving: list[uvicorn.Server] = []

    def leave() -> None:
        if not serving:  # still booting, or waiting for another process that migrates
            os._exit(1)
        serving[0].should_exit = True

    watch_parent(on_end=leave)
    if damage := damage_of(home(root) / "prefect.db"):
        print(json.dumps({"error": damage}), file=out)
        sys.exit(1)
    os.environ.update(protection(port))
    with _migrated(root) as ready:
        import uvicorn
        from prefect.server.api.server import create_app

        app: Any = LocalOnly(create_app(ephemeral=arguments.port is None), port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on"))
        startup = server.startup

        async def startup_and_announce(sockets: list[socket.socket] | None = None) -> None:
            await startup(sockets)
            if server.started:
                serving.append(server)
                ready()
                print(json.dumps({"url": f"http://{HOST}:{port}/api"}), file=out)

        server.startup = startup_and_announce  # type: ignore[method-assign]  # uvicorn has no hook for this
        server.run([listener])


def protection(port: int) -> dict[str, str]:
    """Return Prefect's settings that protect a server on this port, with the names that override their aliases."""
    origins = [f"http://{HOST}:{port}", f"http://localhost:{port}"]
    return {
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(origins),
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_UI_API_URL": f"{origins[0]}/api",
    }


def damage_of(database: Path) -> str | None:
    """Return an error message with a remedy if the database is damaged; None if it is intact or does not exist."""
    if not database.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True)) as connection:
            (result,) = connection.execute("pragma quick_check(1)").fetchone()
    except sqlite3.OperationalError:  # locked or cannot be opened: Prefect reports it
        return None
    except sqlite3.DatabaseError as error:
        result = str(error)
    if result == "ok":
        return None
    return (
        f"Prefect's database {database} is damaged: {' '.join(str(result).split())[:200]}. Move it to another folder, "
        f"with {database.name}-wal and {database.name}-shm if they exist; the same command then creates a new one. "
        "This loses Prefect's data: states of earlier flow runs, deployments, schedules. Artifacts, records, reports "
        "and MLflow runs are not affected"
    )


@contextmanager
def _migrated(root: Path) -> Iterator[Callable[[], None]]:
    """Let one process migrate the database while the others wait. Yield a function to call once the server is up, which
    is after the migration."""
    marker, database = home(root) / ".migrated", home(root) / "prefect.db"
    version = metadata.version("prefect")

    def current() -> bool:
        return marker.is_file() and marker.read_text() == version and _has_tables(database)

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


def _has_tables(database: Path) -> bool:
    """Return True if the database has been migrated; an emptied one has not."""
    if not database.is_file():
        return False
    with closing(sqlite3.connect(database)) as connection:
        try:
            return connection.execute("select count(*) from alembic_version").fetchone()[0] > 0
        except sqlite3.DatabaseError:
            return False


if __name__ == "__main__":
    main()
