"""The Prefect server of a run, and `python -m flows.server [root=DIR]`, which shows earlier runs in a
browser.

With `PREFECT_API_URL` set, that server is used with the user's own settings, and none is started. Else a run starts its
own (`flows.orchestration.server_process`), on a free port of this machine, with its database in `<root>/prefect`. It is
Prefect's own application under uvicorn, in a process of its own, started first of all and awaited last: it boots while
the flow imports what it needs. Left out is what a run does not need: the user interface and its files, the scheduler
and its kin, block types, usage statistics. The database is migrated once, under a lock.

Every server that is started here is protected: it asks for the credential of the root
(`flows.execution.prefect_credential`), for a CSRF token with every change, and answers only its own address and origin.
Our clients get the credential as a Prefect setting of their context, so that it is in no environment that stages
inherit.

The server ends with the run, also when that is killed: it watches a pipe that the run holds.

`flows.serve` and the command start a whole one: on a port that they name, with the user interface, the scheduler and
the rest.
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
"""Of a whole server, where no other is named."""

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
"""Seconds that a server of the user may take to answer before a run."""
PROBE_LIMIT = 3.0
"""The same at its end, after which the server counts as ended."""


def home(root: Path) -> Path:
    """Folder of Prefect's data below a run root."""
    return root / "prefect"


def client_environment(root: Path) -> dict[str, str]:
    """Variables to set before Prefect is imported, where the run has a server of its own. Prefect reads, and executes,
    settings of logging in its home, so this raises ResourceError where that could be another user's."""
    private_root(root)
    return {"PREFECT_HOME": str(home(root)), "PREFECT_PROFILES_PATH": str(home(root) / "profiles.toml"), **QUIET}


class Api(Protocol):
    """The Prefect server that a run uses."""

    ui_command: str
    """The command that shows the runs in a browser."""
    advice: str
    """End of a message about a server that refuses its clients."""

    def url(self) -> str:
        """The API's address, once it answers."""
        ...

    def settings(self) -> dict[str, Any]:
        """Prefect's settings of a client of this server, for `temporary_settings`."""
        ...

    def ended(self) -> bool:
        """Return whether the server is known to have ended."""
        ...

    def kill(self) -> None:
        """Ends at once what was started for the run."""
        ...


class UserServer:
    """The server that PREFECT_API_URL names. Raises ResourceError where it does not answer."""

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self.ui_command = _ui_command_of(self._url)
        self.advice = ". Does it need a credential? PREFECT_API_AUTH_STRING holds it; or unset PREFECT_API_URL"
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
        """It is not ours."""


class Server:
    """A server of our own that boots in the background. Make it with `start`."""

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
            answer = json.loads(line)
            if "error" in answer:
                raise ResourceError(answer["error"])
            self._url = str(answer["url"])
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
        """Waits until the server has ended."""
        self._process.wait()

    def login(self, *, show: bool) -> str:
        """Return the address of the user interface and how to log in there; with `show` the credential itself."""
        how = credential(home(self.root)) if show else f"the text in {self.credential_file}"
        return f"Prefect's user interface: {self.url().removesuffix('/api')}  (log in with {how})"

    def stop(self) -> None:
        """Ends the server; it writes down first what it was told."""
        end(self._process)

    def kill(self) -> None:
        self._process.kill()


_kept: dict[Path, Server] = {}
"""Servers that stay up for the next run of a sweep, by run root; they end with the process."""


def inside_flow() -> bool:
    """Return whether a flow run of Prefect is under way in this context, as in a served deployment."""
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext

    return FlowRunContext.get() is not None


def of_user() -> bool:
    """Return whether runs use a server of the user's."""
    return bool(os.environ.get("PREFECT_API_URL"))


def ui_command(root: Path) -> str:
    """Return the command that shows the runs below a root in a browser: by the user's own server, where there is one,
    or by one that it starts."""
    url = os.environ.get("PREFECT_API_URL")
    return _ui_command_of(url.rstrip("/")) if url else _own_ui_command(root)


def _own_ui_command(root: Path) -> str:
    command = f"{command_path('python')} -m flows.server {shlex.quote(f'root={root}')}"
    return f"{command}  (log in with the text in {home(root) / FILE})"


def _ui_command_of(url: str) -> str:
    return f"open {url.removesuffix('/api')}"


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
    this port; None: what a run needs, on a free one. Raises ResourceError where the port is taken, or others can read
    the credential."""
    if port is not None:
        _free(port)
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
            f"server, use it: PREFECT_API_URL=http://{HOST}:{port}/api, and its credential in PREFECT_API_AUTH_STRING"
        ) from None
