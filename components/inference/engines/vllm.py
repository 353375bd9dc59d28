"""The vLLM engine: a server that the run starts, or existing servers.

The run has one server for each model. It is started for the first stage that needs it and stopped at the end of the run
(`EngineHost.warm`). A stage in another process on this machine receives its URL, which is not part of the stage key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from components.errors import Problem, ResourceError
from components.inference.engine_spec import EngineSpec, ServerEnvironment
from components.inference.protocol import EngineHost, ModelEngine, ensure_usable
from components.inference.vllm.launch import RANKS, VLLM_PYTHON, VLLM_VARIABLE, vllm_on_cpu
from components.models.spec import ModelSpec
from components.specs.marks import ENV_VARIABLE, PROGRAM, SERVER
from components.specs.served import VARIABLE, check_address, key_of

if TYPE_CHECKING:
    from components.inference.vllm.server import VllmServer

SERVER_FIELDS = ("python", "port", "max_lora_rank", "max_loras", "gpu_memory", "cpu_cache_gb", "sleep", "arguments")
"""Fields that identify a server of the run."""
OURS = {
    "host", "port", "model", "served-model-name", "dtype", "max-model-len", "enable-lora", "max-lora-rank", "max-loras",
    "logprobs-mode", "generation-config", "trust-remote-code", "api-key", "enable-sleep-mode",
    "enable-mixed-moe-lora-format", "structured-outputs-config", "structured-outputs-config.backend", "tokenizer",
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
    max_lora_rank: int | None = Field(None, ge=1, le=RANKS[-1])
    """Maximum adapter rank that the server accepts; null: the rank of model.lora."""
    max_loras: int = Field(2, ge=1)
    """Maximum number of adapters per batch; requests to further adapters wait."""
    gpu_memory: float = Field(0.5, gt=0, le=1)
    """Share of the GPU memory that the server reserves; the trainer has the remainder."""
    cpu_cache_gb: int = Field(2, ge=1)
    """Size of the KV cache in GB on a CPU."""
    sleep: bool = False
    """Sleep mode between stages: the server's weights move to CPU memory and its KV cache is dropped, so that the
    trainer has the whole GPU. Only on a GPU."""
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

    def check_prerequisites(self) -> None:
        self.key()
        if not self.urls:
            _ = self.interpreter

    def check_model(self, model: ModelSpec, base_dir: Path) -> None:
        from components.inference.vllm.adapters import check_dtype, check_heads, check_layers

        if model.lora is not None:
            check_layers(base_dir, model.lora.target_modules)
        if not self.urls:
            check_heads(base_dir, self.arguments.get("tensor-parallel-size", 1))
            if self._python.is_file() and not vllm_on_cpu(self._python):
                check_dtype(model)

    @property
    def short_adapters(self) -> bool:
        return True

    def for_rank(self, rank: int) -> VllmSpec:
        # The server needs the rank before the first adapter exists; stages that collect do not know it.
        return self.model_copy(update={"max_lora_rank": self.max_lora_rank or rank})

    def share(self, model: ModelSpec, host: EngineHost) -> VllmSpec:
        return self if self.urls else self.model_copy(update={"urls": [self.server(model, host).url]})

    def server(self, model: ModelSpec, host: EngineHost) -> VllmServer:
        """Return the run's server of this model; start it if it is not running. Raises the errors of `VllmServer`."""
        from components.inference.vllm.server import VllmServer
        from components.models.weights import prepare

        recipe = [model.base().model_dump(), model.content(), self.model_dump(mode="json", include=set(SERVER_FIELDS))]

        def start() -> VllmServer:
            log = host.cache.parent / "logs" / f"vllm-{Path(model.name).name}.log"
            base_dir = prepare(model, host.cache)
            self.check_model(model, base_dir)
            return VllmServer(self, model, base_dir, log, host.on_wait)

        return host.warm.get(f"vllm {json.dumps(recipe)}", recipe, start)

    def build(self, model: ModelSpec, host: EngineHost) -> ModelEngine:
        from components.inference.vllm.engine import VllmEngine
        from components.models.weights import prepare

        base_dir = prepare(model, host.cache)
        if self.urls:
            return ensure_usable(VllmEngine(self, base_dir, max_length=model.max_length, urls=self.urls))
        server = self.server(model, host)
        return ensure_usable(
            VllmEngine(self, base_dir, max_length=model.max_length, urls=[server.url], ours=True, watch=server.check)
        )

    def problems(self, *, rounds: int, lora_rank: int, min_p: float, top_p: float, overlap: int) -> Iterator[Problem]:
        if self.max_lora_rank is not None and lora_rank > self.max_lora_rank:
            yield Problem(
                "inference.max_lora_rank",
                f"{self.max_lora_rank}: less than model.lora.rank={lora_rank}; expected at least {lora_rank}, or null",
            )
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
                "inference.sleep", "true: with collect.overlap the server generates during training; expected false"
            )
        if lora_rank and not self.urls and overlap > self.max_loras:
            yield Problem(
                "inference.max_loras",
                f"{self.max_loras}: collect.overlap={overlap} samples with {overlap} policies at a time, and requests "
                f"to further adapters wait; expected at least {overlap}",
            )
        if self.key_variable and not self.urls:
            yield Problem(
                "inference.key_variable",
                f"{self.key_variable}: the server that the run starts itself has no API key; expected null",
            )
