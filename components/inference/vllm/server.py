"""A vLLM server that the run starts, watches, starts again where it dies, and ends.

It runs in an environment of its own (`make vllm`), listens on this machine only, and ends with the process that started
it, also when that is killed (`launch`). It is up when `/health` answers; what it says goes to a log file, whose last
lines are shown where it dies. Started again, it is behind the same address, so that whoever asked it asks again
(`components.json_client`); adapters it has then forgotten, and `engine` brings them again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.errors import ResourceError, WaitTimeout
from components.inference.spec import RANKS, VllmSpec, flags, vllm_environment, vllm_on_cpu
from components.models.spec import ModelSpec

logger = logging.getLogger(__name__)

LAUNCH = Path(__file__).with_name("launch.py")
NAME = "policy"
"""The base model's name on servers that we start."""
HOST = "127.0.0.1"
LAST_LINES = 12
"""Of the log, shown where the server dies."""
GRACE = 8.0
"""Seconds in which the server may end by itself: a little more than `launch` gives it."""


class VllmServer:
    """Raises ResourceError where the port is taken, vLLM is not installed, or the server dies at its start;
    WaitTimeout where it is not up within `start_timeout`.

    base_dir: folder of the model. model: how it computes. log: file for what the server says. say: told of starts and
    restarts.
    """

    def __init__(
        self,
        spec: VllmSpec,
        model: ModelSpec,
        base_dir: Path,
        log: Path,
        say: Callable[[str], object] = logger.info,
    ):
        self.spec = spec
        self.log = log
        self._say = say
        python = spec.interpreter
        self.port = _free_port(spec.port)
        on_cpu = vllm_on_cpu(python)
        self._command = [str(python), str(LAUNCH), *options(spec, model, base_dir, self.port, on_cpu)]
        self._environment = environment(spec, on_cpu)
        self.starts = 0
        self.dead: str | None = None
        """Why it is not started any more."""
        self._closing = threading.Event()
        self._process = self._start()
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name=f"watcher of vLLM {self.port}", daemon=True)
        self._watcher.start()

    @property
    def url(self) -> str:
        """What OpenAI's clients take as `base_url`."""
        return f"http://{HOST}:{self.port}/v1"

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Ends the server, and all processes of its session."""
        self._closing.set()
        _end(self._process)

    def check(self) -> None:
        """Raises ResourceError where the server has died for good."""
        if self.dead:
            raise ResourceError(self.dead)

    def _start(self) -> subprocess.Popen:
        self.starts += 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._from = log.tell()
            return subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self.log.parent,  # not ours: Python would import from there
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self) -> None:
        """Until the server answers."""
        start = time.monotonic()
        self._say(f"vLLM starts on {self.url}, which takes a while; log: {self.log}")
        while not _healthy(self.port):
            if (code := self._process.poll()) is not None:
                raise ResourceError(f"the vLLM server ended at its start {_how(code)}. {self.last_lines()}")
            if time.monotonic() - start > self.spec.start_timeout:
                raise WaitTimeout(
                    f"waited {self.spec.start_timeout:g} s (inference.start_timeout) for the vLLM server to start. "
                    f"{self.last_lines()}"
                )
            if self._closing.wait(0.2):
                return
        self._say(f"vLLM is up after {time.monotonic() - start:.0f} s")

    def _watch(self) -> None:
        """Starts it again where it dies."""
        while not self._closing.is_set():
            code = self._process.wait()
            if self._closing.is_set():
                return
            died = f"the vLLM server died {_how(code)}. {self.last_lines()}"
            logger.error("%s", died)
            _end(self._process)  # what is left of its session
            if self.starts > self.spec.restarts:
                self.dead = f"{died}\nIt was started {self.starts} times (inference.restarts={self.spec.restarts})"
                return
            self._say(f"the vLLM server died {_how(code)} and is started again")
            self._process = self._start()
            if self._closing.is_set():  # meanwhile: nobody else knows of the new one
                _end(self._process)
                return
            try:
                self._wait()
            except (ResourceError, WaitTimeout) as error:
                self.dead = str(error)
                _end(self._process)
                return

    def last_lines(self) -> str:
        """Of the log since the last start."""
        with open(self.log, "rb") as log:
            log.seek(self._from)
            lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        said = "\n".join(f"  {line[:300]}" for line in lines[-LAST_LINES:]) or "  (nothing)"
        return f"The last lines of its log {self.log}:\n{said}"


def options(spec: VllmSpec, model: ModelSpec, base_dir: Path, port: int, on_cpu: bool) -> list[str]:
    """Of `vllm.entrypoints.openai.api_server`."""
    given: dict[str, Any] = {
        "host": HOST,
        "port": port,
        "model": base_dir,
        "served-model-name": NAME,
        "dtype": model.dtype,
        "max-model-len": model.max_length,
        "generation-config": "vllm",  # no sampling defaults of the model's author
        "logprobs-mode": "processed_logprobs",  # of the distribution that is drawn from
    }
    if model.lora is not None:
        rank = spec.max_lora_rank or model.lora.rank
        given |= {"enable-lora": True, "max-loras": spec.max_loras}
        given["max-lora-rank"] = next(one for one in RANKS if one >= rank)
    if on_cpu:
        given["enforce-eager"] = True
    else:
        given["gpu-memory-utilization"] = spec.gpu_memory
    if spec.sleep:
        given["enable-sleep-mode"] = True
    return flags(given | spec.arguments)


def environment(spec: VllmSpec, on_cpu: bool) -> dict[str, str]:
    """Ours, as the server that this run starts needs it."""
    return {
        **vllm_environment(),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        **({"VLLM_SERVER_DEV_MODE": "1"} if spec.sleep else {}),  # /sleep, /wake_up
        **({"VLLM_CPU_KVCACHE_SPACE": str(spec.cpu_cache_gb)} if on_cpu else {}),
    }


def _free_port(wanted: int) -> int:
    """Raises ResourceError where the port is taken."""
    try:
        with socket.create_server((HOST, wanted)) as found:
            return found.getsockname()[1]
    except OSError as error:
        raise ResourceError(
            f"inference.port: port {wanted} of {HOST} cannot be had ({error.strerror or error}); choose another, 0 for "
            f"any free one, or use the server that is there: inference.urls=[http://{HOST}:{wanted}/v1]"
        ) from None


def _healthy(port: int) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{HOST}:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _how(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _end(process: subprocess.Popen) -> None:
    """The whole session: asks by the end of its standard input, waits, kills."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GRACE)
