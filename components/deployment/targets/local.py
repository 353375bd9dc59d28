"""Local target: our own server on this machine, in a process that outlives the run (`components.inference.server`).

It listens on 127.0.0.1 only, without a key. Its process id is stored with the start time of the process, so a later
process with the same id is never mistaken for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil
from pydantic import Field

from components.data.served.log import FOLDER
from components.data.served.spec import RecordsSpec
from components.deployment.targets.base import Deployment, DeploymentTarget, Release
from components.errors import DeployError, Problem, ResourceError, WaitTimeout
from components.inference.spec import VLLM_PYTHON, flags, vllm_environment, vllm_on_cpu
from components.specs.served import SERVER_KEY_VARIABLE

logger = logging.getLogger(__name__)

CODE = Path(__file__).resolve().parents[3]
CACHE_GB = "2"
"""Size of the KV cache in GB if vLLM runs on a CPU and VLLM_CPU_KVCACHE_SPACE is not set."""
GRACE = 10.0
"""Seconds that a terminated server has to exit."""
LAST_LINES = 20
"""Number of last lines of a server's log that are quoted."""


class LocalTarget(DeploymentTarget):
    """Espalier's own server on this machine, which outlives the run."""

    name: Literal["local"] = "local"
    port: int = Field(0, ge=0, le=65535)
    """Port of the server. 0 takes a free one, so the previous server stays up until the new one has passed its canary.
    With a fixed port the previous server is stopped first, and restarted if the canary fails."""
    start_timeout: float = Field(300.0, gt=0)
    """Seconds in which the server must respond."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Serving engine: `transformers`, our own server, which matches the policy token for token, or `vllm`."""
    python: str | None = None
    """Python of the environment in which vLLM is installed; null: `.venv-vllm/bin/python` beside the code
    (`make vllm`)."""
    arguments: dict[str, str | int | float | bool] = {}
    """Options of vLLM's server: `{tensor-parallel-size: 2}`; true sets an option without a value."""
    record: bool = False
    """Record conversations and the feedback of users in `ROOT/served` (docs/guides/production.md); only with
    `engine: transformers`."""
    records: RecordsSpec = RecordsSpec()
    """Limits and redaction of what is recorded."""

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterable[Problem]:
        if parts.get("record") and parts.get("engine") == "vllm":
            text = "true: vLLM's own server records nothing; expected deploy.target.engine=transformers"
            yield Problem("record", text)

    on_this_machine: ClassVar[bool] = True

    @property
    def fixed_port(self) -> int:
        return self.port

    def check(self, name: str, active: Deployment | None = None) -> None:
        """Raise ResourceError if vLLM is required and not installed, or the port is in use by another server."""
        if self.engine == "vllm" and not os.access(self._python, os.X_OK):
            raise ResourceError(
                f"deploy.target.python: {self._python}, the Python of vLLM's environment, does not exist: create it "
                "with `make vllm`, or set deploy.target.python, or deploy.target.engine=transformers"
            )
        replaced = active is not None and active.details.get("port") == str(self.port) and self.alive(active)
        if not replaced:  # an active server of this model stops before the new one starts, which frees the port
            self._require_free_port()

    def _require_free_port(self) -> None:
        if _in_use(self.port):
            raise ResourceError(
                f"deploy.target.port: {self.port} is in use on this machine; choose another, or 0 for any free one"
            )

    def deploy(self, release: Release, root: Path) -> Deployment:
        self._require_free_port()
        port = self.port or _free_port()
        log = root / f"{release.slug}-{time.strftime('%Y%m%d-%H%M%S')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            process = subprocess.Popen(
                self._command(release, port, root.parent / FOLDER),
                cwd=CODE if self.engine == "transformers" else log.parent,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C ends the run, not the deployment
            )
        url = f"http://127.0.0.1:{port}/v1"
        try:
            self._wait(process, url, log)
            began = psutil.Process(process.pid).create_time()
        except BaseException:
            with contextlib.suppress(psutil.NoSuchProcess):
                _end(psutil.Process(process.pid), 0.0)
            process.wait()
            raise
        process.returncode = 0  # it outlives us; otherwise Python warns about an unawaited process
        details = {"pid": str(process.pid), "began": repr(began), "log": str(log), "port": str(port)}
        details["spec"] = self.model_copy(update={"port": port}).model_dump_json()
        return Deployment("local", release.version, release.digest, url, release.name, details=details)

    def _command(self, release: Release, port: int, served: Path) -> list[str]:
        if self.engine == "transformers":
            options = ["--port", str(port), "--name", release.name, "--max-length", str(release.max_length)]
            if self.record:
                limits = {"--retention-days": self.records.days, "--retention-megabytes": self.records.megabytes}
                options += ["--record", str(served), "--version", release.version]
                options += [f"{name}={value}" for name, value in limits.items()]
                options += [f"--redact={pattern}" for pattern in self.records.redact]
            return [sys.executable, "-m", "components.inference.server", str(release.folder), *options]
        config = json.loads((release.folder / "config.json").read_text())
        settings = {
            "host": "127.0.0.1",
            "port": port,
            "model": release.folder,
            "served-model-name": release.name,
            "max-model-len": release.max_length,
            "dtype": config.get("dtype") or config.get("torch_dtype") or "auto",  # auto would round float32
            "generation-config": "vllm",  # no sampling defaults of the model's author
            "enable-auto-tool-choice": True,
            **_parser_flags(release.folder),
            "enforce-eager": vllm_on_cpu(self._python),
        }
        server = "vllm.entrypoints.openai.api_server"
        return [str(self._python), "-m", server, *flags({**settings, **self.arguments})]

    @property
    def _python(self) -> Path:
        return Path(self.python or VLLM_PYTHON).expanduser().absolute()

    def _environment(self) -> dict[str, str]:
        if self.engine == "transformers":
            return {name: value for name, value in os.environ.items() if name != SERVER_KEY_VARIABLE}
        cache = {"VLLM_CPU_KVCACHE_SPACE": CACHE_GB} if vllm_on_cpu(self._python) else {}  # default: most of the memory
        return {**cache, **vllm_environment()}

    def alive(self, deployment: Deployment) -> bool:
        return _process(deployment) is not None

    def take_back(self, deployment: Deployment) -> None:
        if (process := _process(deployment)) is not None:
            _end(process, GRACE)

    def _wait(self, process: subprocess.Popen, url: str, log: Path) -> None:
        deadline = time.monotonic() + self.start_timeout
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            if process.poll() is not None:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
                raise DeployError(f"the server exited during startup (exit code {process.returncode}):\n{last}")
            try:
                direct.open(f"{url.removesuffix('/v1')}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    raise WaitTimeout(
                        f"timed out after {self.start_timeout:g} s (deploy.target.start_timeout) waiting for the "
                        f"server on {url}; its log is {log}"
                    ) from None
            time.sleep(0.2)


def _parser_flags(folder: Path) -> dict[str, str]:
    """Return the arguments that name vLLM's parsers of the model's calls and reasoning."""
    from components.deployment.vllm_parsers import parser_flags
    from components.models.weights import load_tokenizer
    from components.trajectories.chat import ChatFormat

    return parser_flags(ChatFormat(load_tokenizer(folder)))


def _end(process: psutil.Process, grace: float) -> None:
    """Kill a process and its children, after `grace` seconds in which it may exit by itself."""
    try:
        processes = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    if grace:
        process.terminate()
        psutil.wait_procs([process], grace)
    for member in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(processes, GRACE)


def _process(deployment: Deployment) -> psutil.Process | None:
    """Return the server's process if it still runs and is the same process."""
    try:
        process = psutil.Process(int(deployment.details["pid"]))
        same = abs(process.create_time() - float(deployment.details["began"])) < 1.0
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _in_use(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False
