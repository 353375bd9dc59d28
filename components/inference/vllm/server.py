"""A vLLM server process that the run starts, monitors, restarts after a crash, and stops.

It runs in a separate Python environment (`make vllm`), listens on loopback only, and ends with its parent process, even
if that is killed (`launch`). It starts in the background, and is ready when `/health` responds. Its output goes to a
log file, whose first error is part of the message after a crash (`start_errors`). A restarted server has the same
address, so clients retry their requests (`components.json_client`); its adapters are lost, and `engine` loads them
again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import ResourceError, WaitTimeout
from components.inference.vllm.adapters import MIXED_FORMAT, has_experts
from components.inference.vllm.launch import RANKS, flags, vllm_environment, vllm_on_cpu
from components.inference.vllm.memory import free_share
from components.inference.vllm.start_errors import explain
from components.models.byte_level import byte_level_tokenizer
from components.models.gpus import visible_gpus
from components.models.spec import ModelSpec

if TYPE_CHECKING:
    from components.inference.engines.vllm import VllmSpec

logger = logging.getLogger(__name__)

LAUNCH = Path(__file__).with_name("launch.py")
NAME = "policy"
"""Served name of the base model."""
HOST = "127.0.0.1"
GRACE = 8.0
"""Grace period in seconds before SIGKILL: slightly longer than that of `launch`."""


class VllmServer:
    """A vLLM server, which starts in the background. Raises ResourceError if the port is in use or vLLM is absent.

    base_dir: folder of the model. model: dtype, maximum length and LoRA settings. log: file for the server's output.
    compiled: folder of kernels and graphs that later starts reuse. say: callback for messages about starts and
    restarts.
    """

    def __init__(
        self,
        spec: VllmSpec,
        model: ModelSpec,
        base_dir: Path,
        log: Path,
        compiled: Path,
        say: Callable[[str], object] = logger.info,
    ):
        self.spec = spec
        self.log = log
        self._say = say
        python = spec.interpreter
        self.port = _free_port(spec.port)
        on_cpu = vllm_on_cpu(python)
        tokenizer = readable_tokenizer(base_dir, log.with_name(f"{log.stem}-tokenizer"))
        self._command = [str(python), str(LAUNCH), *options(spec, model, base_dir, self.port, on_cpu, tokenizer)]
        self._environment = environment(spec, on_cpu, compiled)
        self.starts = 0
        self.dead: str | None = None
        """Reason why the server is not restarted any more; None while it runs."""
        self._closing = threading.Event()
        self._started = threading.Event()
        self._failure: ResourceError | WaitTimeout | None = None
        """Error of the first start."""
        self._process = self._start()
        threading.Thread(target=self._supervise, name=f"watcher of vLLM {self.port}", daemon=True).start()

    @property
    def url(self) -> str:
        """Address of the server, as `base_url` of OpenAI's clients."""
        return f"http://{HOST}:{self.port}/v1"

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Wait until the server is ready. Raises ResourceError if it exits during startup, WaitTimeout if it is not
        ready within `start_timeout`."""
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop the server and all processes of its session."""
        self._closing.set()
        _end(self._process)

    def check(self) -> None:
        """Raise ResourceError if the server has died and is not restarted."""
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
                cwd=self.log.parent,  # not the current folder, from which Python would import
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self) -> None:
        """Wait until the server is ready. Raises ResourceError if it exits, WaitTimeout after `start_timeout`."""
        start = time.monotonic()
        self._say(f"vLLM starts on {self.url}, which takes a while; log: {self.log}")
        while not _healthy(self.port):
            if (code := self._process.poll()) is not None:
                raise ResourceError(f"the vLLM server ended at its start {_exit_cause(code)}. {self.explained()}")
            if time.monotonic() - start > self.spec.start_timeout:
                raise WaitTimeout(
                    f"waited {self.spec.start_timeout:g} s (inference.start_timeout) for the vLLM server to start. "
                    f"{self.explained()}"
                )
            if self._closing.wait(0.2):
                return
        self._say(f"vLLM is up after {time.monotonic() - start:.0f} s")

    def _supervise(self) -> None:
        """Wait for the first start, then restart the server after crashes."""
        try:
            self._wait()
        except (ResourceError, WaitTimeout) as error:
            self._failure, self.dead = error, str(error)
            _end(self._process)
        finally:
            self._started.set()
        if self._failure is None:
            self._watch()

    def _watch(self) -> None:
        """Restart the server after each crash, up to `restarts` times."""
        while not self._closing.is_set():
            code = self._process.wait()
            if self._closing.is_set():
                return
            died = f"the vLLM server died {_exit_cause(code)}. {self.explained()}"
            logger.error("%s", died)
            _end(self._process)  # remaining processes of its session
            if self.spec.max_lora_rank == 0:
                self.dead = f"{died}\nA second start would serve the base model's weights, not those of the policy"
                return
            if self.starts > self.spec.restarts:
                self.dead = f"{died}\nIt was started {self.starts} times (inference.restarts={self.spec.restarts})"
                return
            self._say(f"the vLLM server died {_exit_cause(code)} and is started again")
            self._process = self._start()
            if self._closing.is_set():  # closed in the meantime: `close` did not see the new process
                _end(self._process)
                return
            try:
                self._wait()
            except (ResourceError, WaitTimeout) as error:
                self.dead = str(error)
                _end(self._process)
                return

    def explained(self) -> str:
        """Return the path of the log, and its first error since the last start (`start_errors.explain`)."""
        with open(self.log, "rb") as log:
            log.seek(self._from)
            return f"Its log: {self.log}. {explain(log.read().decode('utf-8', 'replace'))}"


def options(
    spec: VllmSpec, model: ModelSpec, base_dir: Path, port: int, on_cpu: bool, tokenizer: Path | None = None
) -> list[str]:
    """Return the command-line options of `vllm.entrypoints.openai.api_server`. tokenizer: folder; None: the model's."""
    values: dict[str, Any] = {
        "host": HOST,
        "port": port,
        "model": base_dir,
        "served-model-name": NAME,
        "dtype": model.dtype,
        "max-model-len": model.max_length,
        "generation-config": "vllm",  # no sampling defaults of the model's author
        "logprobs-mode": "processed_logprobs",  # of the sampling distribution
        "structured-outputs-config.backend": "guidance",  # the library of `components.inference.grammar`
    }
    if tokenizer is not None:
        values["tokenizer"] = tokenizer
    if model.lora is not None and spec.max_lora_rank != 0:
        rank = spec.max_lora_rank or model.lora.rank
        values |= {"enable-lora": True, "max-loras": spec.max_loras}
        values["max-lora-rank"] = next(supported for supported in RANKS if supported >= rank)
        values[MIXED_FORMAT] = has_experts(base_dir)
    if on_cpu:
        values["enforce-eager"] = True
    else:
        share = spec.gpu_memory
        values["gpu-memory-utilization"] = free_share(sleeps=spec.sleep > 0) if share is None else share
        if spec.max_batch is not None:
            values["max-cudagraph-capture-size"] = capture_size(spec.max_batch)
        shards = [int(spec.arguments.get(f"{kind}-parallel-size", 1)) for kind in ("tensor", "pipeline")]
        if (ranks := len(visible_gpus()) // math.prod(shards)) > 1:
            values["data-parallel-size"] = ranks  # each has the whole model, and adapters are loaded into all
    if spec.sleep:
        values["enable-sleep-mode"] = True
    if spec.prefix_caching is not None:
        values["enable-prefix-caching" if spec.prefix_caching else "no-enable-prefix-caching"] = True
    if spec.quantization is not None:
        values["quantization"] = spec.quantization
    if spec.speculative is not None:
        values["speculative-config"] = json.dumps(spec.speculative)
    return flags(values | spec.arguments)


def capture_size(requests: int) -> int:
    """Return the largest batch of which vLLM captures a CUDA graph, so that one of `requests` runs as a graph. It
    captures 1, 2, 4, multiples of 8 up to 256, and of 16 beyond."""
    step = 16 if requests > 256 else 8
    return next((size for size in (1, 2, 4) if size >= requests), -(-requests // step) * step)


def environment(spec: VllmSpec, on_cpu: bool, compiled: Path) -> dict[str, str]:
    """Return the environment variables of a started server. compiled: folder of compiled kernels and graphs."""
    return {
        **vllm_environment(),
        "VLLM_CACHE_ROOT": str(compiled),  # with those of inductor
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        # /sleep, /wake_up; /pause, /collective_rpc
        **({"VLLM_SERVER_DEV_MODE": "1"} if spec.sleep or spec.max_lora_rank == 0 else {}),
        **({"VLLM_CPU_KVCACHE_SPACE": str(spec.cpu_cache_gb)} if on_cpu else {}),
    }


def _free_port(wanted: int) -> int:
    """Return `wanted`, or a free port for 0. Raises ResourceError if the port is in use."""
    try:
        with socket.create_server((HOST, wanted)) as listener:
            return listener.getsockname()[1]
    except OSError as error:
        raise ResourceError(
            f"inference.port: port {wanted} of {HOST} cannot be bound ({error.strerror or error}); choose another, 0 "
            f"for any free one, or use the existing server: inference.urls=[http://{HOST}:{wanted}/v1]"
        ) from None


def _healthy(port: int) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{HOST}:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _exit_cause(code: int) -> str:
    """Return the description of an exit code."""
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _end(process: subprocess.Popen) -> None:
    """Stop the whole session: close its standard input, wait, then kill."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GRACE)


_COPIED = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "config.json")


def readable_tokenizer(base_dir: Path, out: Path) -> Path | None:
    """Write the tokenizer of `base_dir` without unused decoders to the folder `out`, and return it; None if
    llguidance reads the model's own."""
    text = byte_level_tokenizer(base_dir)
    if text is None:
        return None
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        for name in _COPIED:
            if (base_dir / name).is_file():
                shutil.copy(base_dir / name, folder / name)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        out.mkdir(exist_ok=True)
        for file in folder.iterdir():
            os.replace(file, out / file.name)
    return out
