"""Prefect servers: the server of a run, and the one of `python -m flows.runs ui [root=DIR]`.

If `PREFECT_API_URL` is set, runs use that server with the user's own settings and start none. Otherwise a run starts
its own server (`flows.orchestration.server_process`) on a free port of this machine, with its database in
`<root>/prefect`. It is Prefect's application under uvicorn in a separate process. It starts first and is awaited last,
so that it boots while the flow imports its modules. It omits what a run does not need: the user interface, the
scheduler and similar services, block types, usage statistics. The database is migrated once, under a lock.

Every server started here is protected: it requires the credential of the root (`flows.execution.prefect_credential`)
and a CSRF token with every change, and only answers requests to its own address and from its own origin. Clients get
the credential as a Prefect setting of their context, so that no environment inherited by stages contains it.

The server stops with its run, even if the run is killed: it watches a pipe that the run holds open.

`flows.serve` and `flows.runs ui` start a full server on a given port, with the user interface and all services.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from components.artifacts.roots import private_root
from components.compute.runners import end
from components.errors import ResourceError, WaitTimeout
from components.tracking.provenance import command_path
from flows.execution.prefect_credential import FILE, credential

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
PORT = 4200
"""Default port of a full server."""

START_LIMIT = 180.0
"""Seconds in which a server has to start; the first start, on a slow disk, takes longest."""

QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",  # `flows.orchestration.prefect_log` sends the logs, masked
    "PREFECT_CLI_PROMPT": "false",
}
"""Environment variables of clients and servers."""


ANSWER_LIMIT = 10.0
"""Seconds in which the user's server has to answer before a run."""
PROBE_LIMIT = 3.0
"""Seconds in which the user's server has to answer at the end of a run; otherwise it counts as stopped."""


def home(root: Path) -> Path:
    """Return the folder of Prefect's data below a run root."""
    return root / "prefect"


def client_environment(root: Path) -> dict[str, str]:
    """Return the variables to set before Prefect is imported, for a run with its own server.

    Prefect reads and executes logging settings in its home, so this raises ResourceError if another user could write
    there.
    """
    private_root(root)
    return {"PREFECT_HOME": str(home(root)), "PREFECT_PROFILES_PATH": str(home(root) / "profiles.toml"), **QUIET}


class Api(Protocol):
    """Prefect server that a run uses."""

    ui_command: str
    """Command that shows the runs in a browser."""
    advice: str
    """Advice appended to the error message of a rejected request."""

    def url(self) -> str:
        """Return the API's URL once the server answers."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return Prefect's client settings for this server, for `temporary_settings`."""
        ...

    def ended(self) -> bool:
        """Return True if the server has stopped."""
        ...

    def kill(self) -> None:
        """Kill the server process if the run started it."""
        ...


class UserServer:
    """Server at PREFECT_API_URL. Raises ResourceError if it does not answer."""

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self.ui_command = _ui_command_of(self._url)
        self.advice = ". If it needs a credential, set PREFECT_API_AUTH_STRING; or unset PREFECT_API_URL"
        try:
            urllib.request.urlopen(f"{self._url}/health", timeout=ANSWER_LIMIT).close()
        except urllib.error.HTTPError as error:
            error.close()  # the server answers; Prefect reports missing access
        except (OSError, ValueError) as error:
            raise ResourceError(
                f"PREFECT_API_URL={url}: no Prefect server answers ({error}). Start it, correct the variable, or unset "
                "it so that the run starts its own server"
            ) from None

    def url(self) -> str:
        return self._url

    def settings(self) -> dict[str, Any]:
        return {"api.url": self._url}

    def ended(self) -> bool:
        try:
            urllib.request.urlopen(f"{self._url}/health", timeout=PROBE_LIMIT).close()
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            return True
        return False

    def kill(self) -> None:
        """Do nothing: the run did not start this server."""


class PrefectServer:
    """Server process that boots in the background. Create it with `start`."""

    def __init__(self, process: subprocess.Popen, root: Path, log: Path):
        self.credential_file = home(root) / FILE
        self.ui_command = _own_ui_command(root)
        self.advice = f"; its log is {log}, its database {home(root) / 'prefect.db'}"
        self.root = root
        self._process = process
        self._log = log
        self._url: str | None = None
        self._started = time.monotonic()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def url(self) -> str:
        """Return the API's URL once the server answers.

        Raises ResourceError if the process ends instead, and WaitTimeout after `START_LIMIT` seconds; both messages
        name the log.
        """
        if self._url is None:
            assert self._process.stdout is not None
            remaining = max(0.0, START_LIMIT - (time.monotonic() - self._started))
            if not select.select([self._process.stdout], [], [], remaining)[0]:
                raise WaitTimeout(
                    f"the Prefect server did not start within {START_LIMIT:.0f} s; see its log {self._log}"
                )
            line = self._process.stdout.readline()
            if not line:
                raise ResourceError(f"the Prefect server stopped during startup; see its log {self._log}")
            message = json.loads(line)
            if "error" in message:
                raise ResourceError(message["error"])
            self._url = str(message["url"])
            logger.debug("Prefect server at %s after %.1f s", self._url, time.monotonic() - self._started)
        return self._url

    def settings(self) -> dict[str, Any]:
        return {
            "api.url": self.url(),
            "api.auth_string": credential(home(self.root)),
            "client.csrf_support_enabled": True,
        }

    def ended(self) -> bool:
        return not self.alive

    def wait(self) -> None:
        """Wait until the server stops."""
        self._process.wait()

    def login(self, *, show: bool) -> str:
        """Return the user interface's URL and the login. show: include the credential itself, not only its file."""
        login = credential(home(self.root)) if show else f"the text in {self.credential_file}"
        return f"Prefect's user interface: {self.url().removesuffix('/api')}  (log in with {login})"

    def stop(self) -> None:
        """Stop the server gracefully, so that it stores the states that it has received."""
        end(self._process)

    def kill(self) -> None:
        self._process.kill()


_shared_servers: dict[Path, PrefectServer] = {}
"""Servers that stay up for the next run of a sweep, by run root; they stop with this process."""


def inside_flow() -> bool:
    """Return True inside a flow run of Prefect, as in a served deployment."""
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext

    return FlowRunContext.get() is not None


def of_user() -> bool:
    """Return True if runs use the user's own server (PREFECT_API_URL)."""
    return bool(os.environ.get("PREFECT_API_URL"))


def ui_command(root: Path) -> str:
    """Return the command that shows the runs below a root in a browser, on the user's server if there is one, else on a
    server that the command starts."""
    url = os.environ.get("PREFECT_API_URL")
    return _ui_command_of(url.rstrip("/")) if url else _own_ui_command(root)


def _own_ui_command(root: Path) -> str:
    command = f"{command_path('python')} -m flows.runs ui {shlex.quote(f'root={root}')}"
    return f"{command}  (log in with the text in {home(root) / FILE})"


def _ui_command_of(url: str) -> str:
    return f"open {url.removesuffix('/api')}"


@contextmanager
def for_run(root: Path, *, keep: bool = False) -> Iterator[Api]:
    """Yield the server for one run below `root`: the user's, or a new one that stops with the run.

    keep: keep the new server until this process ends. Sets the environment variables that Prefect's import needs. The
    server boots in the background; call `url` to wait for it.
    """
    os.environ.setdefault("DO_NOT_TRACK", "1")
    if url := os.environ.get("PREFECT_API_URL"):
        yield UserServer(url)
        return
    os.environ.update(client_environment(root))
    server = _shared_servers.pop(root, None)
    if server is None or not server.alive:
        server = start(root)
    if keep:
        _shared_servers[root] = server
        atexit.register(server.stop)
        yield server
        return
    try:
        yield server
    finally:
        server.stop()


def start(root: Path, port: int | None = None) -> PrefectServer:
    """Start a server on the data below `root` without waiting for it.

    port: start a full server with the user interface on this port; None: start a reduced server for a run on a free
    port. Raises ResourceError if the port is taken or other users can read the credential.
    """
    if port is not None:
        _check_free(port)
    log = root / "logs" / "prefect-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    home(root).mkdir(parents=True, exist_ok=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"},
        **client_environment(root),
        "PREFECT_SERVER_API_AUTH_STRING": credential(home(root)),
        "PREFECT_SERVER_UI_ENABLED": "false" if port is None else "true",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home(root) / "ui"),
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
        "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
    }
    with open(log, "ab") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "flows.orchestration.server_process",
                f"root={root}",
                *(["--port", str(port)] if port else []),
            ],
            cwd=Path(__file__).resolve().parents[2],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,  # Ctrl-C only reaches the run, which stops the server after its last request
        )
    return PrefectServer(process, root, log)


def _check_free(port: int) -> None:
    """Raise ResourceError if the port is taken."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ResourceError(
            f"--port {port}: cannot listen ({reason}). Choose another port; or, if a Prefect server runs there, use "
            f"it: set PREFECT_API_URL=http://{HOST}:{port}/api and PREFECT_API_AUTH_STRING to its credential"
        ) from None
