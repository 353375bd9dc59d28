"""The vLLM engine: a server that the run starts, or existing servers.

The run has one server for each model. It is started for the first stage that needs it and stopped at the end of the run
(`EngineHost.warm`). A stage in another process on this machine receives its URL, which is not part of the stage key.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from components.errors import EspalierError, Problem, ResourceError
from components.inference.engine_spec import EngineSpec, ServerEnvironment, Speed
from components.inference.protocol import EngineHost, ModelEngine, ensure_usable
from components.inference.vllm.launch import RANKS, VLLM_PYTHON, VLLM_VARIABLE, vllm_on_cpu, vllm_version
from components.models.spec import ModelSpec
from components.specs.marks import ENV_VARIABLE, PROGRAM, SERVER
from components.specs.served import VARIABLE, check_address, key_of

if TYPE_CHECKING:
    from components.inference.vllm.server import VllmServer

logger = logging.getLogger(__name__)

SERVER_FIELDS = (
    "python", "port", "max_lora_rank", "max_loras", "max_batch", "gpu_memory", "cpu_cache_gb", "sleep",
    "prefix_caching", "quantization", "speculative", "arguments",
)  # fmt: skip
"""Fields that identify a server of the run."""
COMPILED = Path("compiled", "vllm")
"""Folder below the root for what vLLM compiles."""
START, COMPILATION = 128.0, 31.0
"""Seconds of a start on a GPU, and those of its compilation, which a later start reads from `COMPILED`."""
DISCARDS = (0, 32)
"""First version whose `reload_weights` knows the layers of adapters."""
EXACT_RULES = ("standard", "block")
"""Values of `rejection_sample_method` that keep the distribution of the policy."""
OURS = {
    "host", "port", "model", "served-model-name", "dtype", "max-model-len", "enable-lora", "max-lora-rank", "max-loras",
    "logprobs-mode", "generation-config", "trust-remote-code", "api-key", "enable-sleep-mode",
    "enable-mixed-moe-lora-format", "structured-outputs-config", "structured-outputs-config.backend", "tokenizer",
    "max-cudagraph-capture-size", "gpu-memory-utilization", "quantization", "speculative-config",
    "enable-prefix-caching", "no-enable-prefix-caching",
}  # fmt: skip
"""Server options that the run sets from the rest of the configuration, or that are not allowed."""


class VllmSpec(EngineSpec):
    """vLLM: a server that the run starts, or existing servers."""

    key_path: ClassVar[str] = "inference"

    name: Literal["vllm"] = "vllm"
    urls: Annotated[list[str], SERVER] = []
    """Existing servers, as `base_url` of OpenAI's clients. A request goes to the server with the fewest requests in
    flight; all requests of a conversation go to the same server. Empty: the run starts and stops a server."""
    key_variable: Annotated[str | None, ENV_VARIABLE] = Field(None, pattern=VARIABLE)
    """Environment variable with the API key of the servers in `urls`; null sends no key."""
    python: Annotated[str | None, PROGRAM] = None
    """Python interpreter of the environment with vLLM, on the machine of the stage; null: `.venv-vllm/bin/python`
    beside the code (`make vllm`), and on SkyPilot's machines an environment that they install."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the started server, on 127.0.0.1; 0 picks a free port."""
    max_lora_rank: int | None = Field(None, ge=0, le=RANKS[-1])
    """Maximum adapter rank that the server accepts; null: the rank of model.lora. 0, which follows from
    model.lora=null: the server is given all weights of each policy."""
    max_loras: int = Field(2, ge=1)
    """Maximum number of adapters per batch; requests to further adapters wait."""
    max_batch: int | None = Field(None, ge=1)
    """Largest number of concurrent requests, for which a server on a GPU captures CUDA graphs; larger batches run
    without. null: what `collect.concurrency`, `collect.overlap` and `evaluate.concurrency` allow."""
    gpu_memory: float | None = Field(None, gt=0, le=1)
    """Share of the GPU memory that the server reserves; the trainer has the remainder. null: half of the memory that is
    free at its start, or nine tenths with `sleep`."""
    cpu_cache_gb: int = Field(2, ge=1)
    """Size of the KV cache in GB on a CPU."""
    sleep: int = Field(0, ge=0, le=2)
    """Sleep between stages, so that the trainer has the whole GPU. 0: none. 1: the server's weights move to CPU memory
    and its KV cache is dropped. 2: its weights are dropped too and read again from disk, which takes longer; adapters
    need vLLM 0.32. Only on a GPU."""
    prove: bool = True
    """After each adapter load and each sleep, compare the server's log-probabilities of known tokens with transformers
    in float32 on the CPU: mean difference at most 1e-4 nats in float32, 0.05 in bfloat16 and float16."""
    prefix_caching: bool | None = None
    """Reuse the keys and values of equal prompt beginnings; null: vLLM's default for the model."""
    quantization: str | None = Field(None, min_length=1)
    """Number format of the served weights, such as `fp8`; null: that of the model. Its log-probabilities are not those
    of the trained weights, so it is for evaluation only (`rounds=0`)."""
    speculative: dict[str, str | int | float | bool] | None = None
    """Speculative decoding, as `--speculative-config` of vLLM: `{method: ngram, num_speculative_tokens: 4}`. Rejection
    sampling keeps the policy's distribution, and log-probabilities are those of the policy; other rules of acceptance
    are for evaluation only (`rounds=0`)."""
    arguments: Annotated[dict[str, str | int | float | bool], PROGRAM] = {}
    """Additional server options, such as `{tensor-parallel-size: 2}`. true is an option without a value."""
    start_timeout: float = Field(900.0, gt=0)
    """Time limit in seconds until the started server responds."""
    restarts: int = Field(2, ge=0)
    """Maximum number of restarts per run after the server dies."""
    on_swap: Literal["finish", "abort"] = "abort"
    """Episodes in flight when the next policy is loaded: `abort` fails them as stale, `finish` completes them with the
    policy that they began with."""
    timeout: float = Field(300.0, gt=0)
    """Time limit of one response in seconds."""
    retry_for: float = Field(180.0, ge=0)
    """Period in seconds in which a failed request is retried: at least the duration of a restart."""
    wait_for: float = Field(0.0, ge=0)
    """Seconds to wait for a server of `urls` that has not answered yet. With 0, a refused connection or an unknown
    host is an error at first contact."""
    max_requests: int | None = Field(None, ge=1)
    """Maximum number of concurrent requests per server; further requests wait. None: as many as there are episodes."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        for url in value:
            check_address(url, key=f"{cls.key_path}.key_variable")
        return [url.rstrip("/") for url in value]

    @field_validator("arguments")
    @classmethod
    def _reject_run_options(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name.strip("-").replace("_", "-") in OURS:
                raise ValueError(f"options that the run does not set itself; {name} is set by the run")
        return {name.strip("-").replace("_", "-"): option for name, option in value.items()}

    @property
    def is_external(self) -> bool:
        return bool(self.urls)

    @property
    def completes_responses(self) -> bool:
        return True

    @property
    def environment(self) -> ServerEnvironment | None:
        return None if self.urls else ServerEnvironment("vllm", self.python)

    @property
    def interpreter(self) -> Path:
        """Return the Python interpreter of the environment with vLLM. Raises ResourceError if it does not exist."""
        python = self._python
        if not python.is_file():
            raise ResourceError(
                f"inference.python: vLLM's environment is not there ({python}). Run `make vllm` to install it, set "
                "inference.python to another environment's interpreter, or use a running server: "
                "inference.urls=[http://127.0.0.1:8000/v1]"
            )
        return python

    @property
    def _python(self) -> Path:
        return Path(self.python or os.environ.get(VLLM_VARIABLE) or VLLM_PYTHON).expanduser()

    def key(self) -> str:
        """Return the servers' API key; empty without one. Raises ResourceError if `key_variable` is not set."""
        return key_of(self.key_variable, self.key_path, ", ".join(self.urls))

    def key_part(self) -> dict[str, Any]:
        return {"inference": {"name": self.name}}  # neither the address nor the options

    def speed(self, root: Path, *, gpu: bool) -> Speed | None:
        if self.urls:
            return None
        compiled = (root / COMPILED).is_dir()
        return Speed(START - compiled * COMPILATION, 6400.0) if gpu else Speed(60.0, 90.0)

    def check_prerequisites(self) -> None:
        self.key()
        if not self.urls:
            _ = self.interpreter

    def check_model(self, model: ModelSpec, base_dir: Path) -> None:
        from components.inference.vllm.adapters import check_dtype, check_heads, check_layers

        adapters = model.lora is not None and self.max_lora_rank != 0
        if adapters and model.lora is not None:
            check_layers(base_dir, model.lora.target_modules)
        if not self.urls:
            check_heads(base_dir, self.arguments.get("tensor-parallel-size", 1))
            if adapters and self._python.is_file() and not vllm_on_cpu(self._python):
                check_dtype(model)
            if self.sleep == 2 and adapters and (version := vllm_version(self._python)) < DISCARDS:
                raise ResourceError(
                    f"inference.sleep = 2: vLLM {'.'.join(map(str, version))} cannot read weights again beside "
                    "adapters; expected 1, or vLLM 0.32"
                )

    @property
    def short_adapters(self) -> bool:
        return True

    @property
    def loads_weights(self) -> bool:
        return True

    def sized(self, rank: int, requests: int) -> VllmSpec:
        # The server needs the rank before the first adapter exists; stages that collect do not know it.
        rank = (self.max_lora_rank or rank) if rank else 0
        sizes = {"max_lora_rank": rank, "max_batch": self.max_batch or requests}
        return self.model_copy(update=sizes)

    def share(self, model: ModelSpec, host: EngineHost) -> VllmSpec:
        return self if self.urls else self.model_copy(update={"urls": [self.server(model, host).url]})

    def start(self, model: ModelSpec, host: EngineHost) -> None:
        if not self.urls:
            threading.Thread(target=self._start, args=(model, host), name="start of vLLM", daemon=True).start()

    def server(self, model: ModelSpec, host: EngineHost) -> VllmServer:
        """Return the run's server of this model when it is ready; start it if it is not running. Raises the errors of
        `VllmServer.wait`."""
        server = self._launched(model, host)
        server.wait()
        return server

    def _start(self, model: ModelSpec, host: EngineHost) -> None:
        try:
            self._launched(model, host)
        except EspalierError as error:  # the first stage that needs the server raises it
            logger.info("vLLM does not start: %s", error)

    def _launched(self, model: ModelSpec, host: EngineHost) -> VllmServer:
        """Return the run's server of this model, which may not be ready yet."""
        from components.inference.vllm.server import VllmServer
        from components.models.weights import prepare

        recipe = [model.base().model_dump(), model.content(), self.model_dump(mode="json", include=set(SERVER_FIELDS))]

        def launch() -> VllmServer:
            root = host.cache.parent
            base_dir = prepare(model, host.cache)
            self.check_model(model, base_dir)
            log = root / "logs" / f"vllm-{Path(model.name).name}.log"
            return VllmServer(self, model, base_dir, log, root / COMPILED, host.on_wait)

        return host.warm.get(f"vllm {json.dumps(recipe)}", recipe, launch)

    def build(self, model: ModelSpec, host: EngineHost) -> ModelEngine:
        from components.inference.vllm.engine import VllmEngine
        from components.models.weights import prepare

        base_dir = prepare(model, host.cache)
        server = None if self.urls else self.server(model, host)
        return ensure_usable(
            VllmEngine(
                self,
                base_dir,
                max_length=model.max_length,
                dtype=model.dtype,
                urls=self.urls if server is None else [server.url],
                ours=server is not None,
                watch=(lambda: None) if server is None else server.check,
            )
        )

    @property
    def _inexact(self) -> dict[str, Any]:
        """Settings with which log-probabilities are not those of the policy, by their path below `inference`."""
        rule = (self.speculative or {}).get("rejection_sample_method", "standard")
        cache = self.arguments.get("kv-cache-dtype", "auto")
        values = {
            "quantization": self.quantization,
            "speculative.rejection_sample_method": rule if rule not in EXACT_RULES else None,
            "arguments.kv-cache-dtype": cache if cache != "auto" else None,
        }
        return {name: value for name, value in values.items() if value is not None}

    def notes(self) -> Iterator[str]:
        if self.quantization is not None:
            yield f"inference.quantization={self.quantization}: episodes are those of the policy in this number format"
        if self.speculative is not None:
            yield "inference.speculative: vLLM drafts tokens, and accepts them so that the policy's distribution stays"
        if self.prefix_caching is not None:
            state = "reused" if self.prefix_caching else "computed for each request"
            yield f"inference.prefix_caching={self.prefix_caching}: equal prompt beginnings are {state}"
        if self.sleep:
            state = "move to CPU memory" if self.sleep == 1 else "are dropped and read again"
            yield f"inference.sleep={self.sleep}: between stages the weights of vLLM {state}"

    def problems(self, *, rounds: int, lora_rank: int, min_p: float, top_p: float, overlap: int) -> Iterator[Problem]:
        if self.max_lora_rank is not None and lora_rank > self.max_lora_rank:
            yield Problem(
                "inference.max_lora_rank",
                f"{self.max_lora_rank}: less than model.lora.rank={lora_rank}; expected at least {lora_rank}, or null",
            )
        if self.max_lora_rank == 0 and lora_rank:
            yield Problem("inference.max_lora_rank", f"0, but model.lora.rank={lora_rank}; expected null")
        if lora_rank > RANKS[-1]:
            yield Problem(
                "model.lora.rank", f"{lora_rank}: vLLM supports at most {RANKS[-1]}; expected {RANKS[-1]} or less"
            )
        if min_p > 0 and top_p < 1 and rounds:
            yield Problem(
                "collect.min_p",
                f"{min_p:g}: vLLM applies it before collect.top_p={top_p:g}, but training computes "
                "log-probabilities with the opposite order; expected one of them",
            )
        if self.sleep and overlap:
            yield Problem(
                "inference.sleep",
                f"{self.sleep}: with collect.overlap the server generates while a round trains; expected 0",
            )
        if not lora_rank:
            yield from self._problems_of_weights(overlap)
        if lora_rank and not self.urls and overlap > self.max_loras:
            yield Problem(
                "inference.max_loras",
                f"{self.max_loras}: collect.overlap={overlap} samples with {overlap} policies at a time, and requests "
                f"to further adapters wait; expected at least {overlap}",
            )
        for name, value in self._inexact.items():
            if rounds:
                yield Problem(
                    f"inference.{name}",
                    f"{value}: training needs the log-probabilities of the trained weights, which such a server does "
                    "not give; expected null, or rounds=0 for an evaluation",
                )
        if self.speculative is not None and min_p > 0 and rounds:
            yield Problem("collect.min_p", f"{min_p:g}: vLLM ignores it with inference.speculative; expected 0")
        for name in ("quantization", "speculative", "prefix_caching"):
            if getattr(self, name) is not None and self.urls:
                yield Problem(f"inference.{name}", "set, but inference.urls are running servers; expected null")
        if self.key_variable and not self.urls:
            yield Problem(
                "inference.key_variable",
                f"{self.key_variable}: the server that the run starts itself has no API key; expected null",
            )

    def _problems_of_weights(self, overlap: int) -> Iterator[Problem]:
        """Yield the settings that a server with all weights of one policy does not support."""
        reason = "with model.lora=null a server has the weights of one policy at a time"
        if self.urls:
            text = "running servers, which would have other weights after a restart without a sign of it"
            yield Problem("inference.urls", f"{text} (model.lora=null); expected [], or model.lora with a rank")
        if overlap:
            yield Problem("collect.overlap", f"{overlap}: {reason}; expected 0, or model.lora with a rank")
        if self.on_swap == "finish":
            yield Problem("inference.on_swap", f"finish: {reason}; expected abort")
        if self.quantization is not None:
            yield Problem("inference.quantization", f"{self.quantization}: set with model.lora=null; expected null")
