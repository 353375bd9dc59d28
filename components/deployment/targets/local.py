"""A server of our own on this machine, in a process that outlives the run: `components.inference.server`.

It listens on 127.0.0.1 only. Its process id is kept with the time at which the process began, so that another process
that has the id by now is never taken for it.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from components.deployment.targets.protocol import Deployment, Release
from components.errors import DeployError, ResourceError, WaitTimeout

if TYPE_CHECKING:
    from components.deployment.targets.spec import LocalTarget

logger = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds in which a server ends after it was told to."""
SHOWN = 20
"""Last lines of a server's log in a message."""


class Local:
    def __init__(self, spec: LocalTarget):
        self.spec = spec

    def check(self, name: str) -> None:
        """Nothing is needed; whether the port is free is known when it is wanted."""

    def deploy(self, release: Release, root: Path) -> Deployment:
        port = self.spec.port or _free_port()
        if _taken(port):
            raise ResourceError(
                f"deploy.target.port: {port} is in use on this machine; choose another, or 0 for any free one"
            )
        log = root / f"{release.slug}-{time.strftime('%Y%m%d-%H%M%S')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "components.inference.server", str(release.folder)]
        command += ["--port", str(port), "--name", release.name, "--max-length", str(release.max_length)]
        with open(log, "ab") as output:
            process = subprocess.Popen(
                command,
                cwd=Path(__file__).resolve().parents[3],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C ends the run, not what it has deployed
            )
        url = f"http://127.0.0.1:{port}/v1"
        try:
            self._wait(process, url, log)
            began = psutil.Process(process.pid).create_time()
        except BaseException:
            process.kill()
            process.wait()
            raise
        process.returncode = 0  # it outlives us: else Python warns of a process that nobody waited for
        details = {"pid": str(process.pid), "began": repr(began), "log": str(log), "port": str(port)}
        return Deployment("local", release.version, release.digest, url, release.name, details=details)

    def alive(self, deployment: Deployment) -> bool:
        return _process(deployment) is not None

    def take_back(self, deployment: Deployment) -> None:
        process = _process(deployment)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(GRACE)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(GRACE)

    def _wait(self, process: subprocess.Popen, url: str, log: Path) -> None:
        deadline = time.monotonic() + self.spec.start_timeout
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            if process.poll() is not None:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN:])
                raise DeployError(f"the server ended while it started (exit code {process.returncode}):\n{last}")
            try:
                direct.open(f"{url.removesuffix('/v1')}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    raise WaitTimeout(
                        f"waited {self.spec.start_timeout:g} s (deploy.target.start_timeout) for the server on {url}; "
                        f"its log is {log}"
                    ) from None
            time.sleep(0.2)


def _process(deployment: Deployment) -> psutil.Process | None:
    """The server's process, where it lives and is the very one."""
    try:
        found = psutil.Process(int(deployment.details["pid"]))
        same = abs(found.create_time() - float(deployment.details["began"])) < 1.0
        return found if same and found.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _taken(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False
