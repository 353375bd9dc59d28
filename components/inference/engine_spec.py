"""Base class of inference engines: the configuration of an engine, and what is known of it.

Each engine is a module of `components.inference.engines` with a file in `conf/inference`; `components.inference.spec`
derives the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.errors import Problem, SpecError
from components.inference.protocol import EngineHost, ModelEngine
from components.models.spec import ModelSpec
from components.specs import Spec


@dataclass(frozen=True)
class ServerEnvironment:
    """Python environment of an engine's server, besides that of the project."""

    package: str
    """Package that it contains: `vllm`."""
    python: str | None
    """Its interpreter on the machine of the stage; None: the one that `make` or the setup of the machine installs."""


MEASURED_LAYERS = 30
"""Layers of SmolLM2-135M, with which speeds were measured."""


@dataclass(frozen=True)
class Speed:
    """Measured speed of an engine with SmolLM2-135M, for estimates: on one H200, or on two CPU cores."""

    start: float
    """Seconds until it generates."""
    rate: float
    """Sampled tokens per second with 32 to 64 requests at a time."""


class EngineSpec(Spec):
    """Base class of engines. A subclass that is an engine has a `name`."""

    name: str

    @property
    def in_process(self) -> bool:
        """True if the engine runs in the process of the stage, with the trainer's implementation of the model."""
        return False

    @property
    def needs_model(self) -> bool:
        """True if the engine loads the weights that it is built for; False if its server has a model of its own."""
        return True

    @property
    def is_external(self) -> bool:
        """True if it queries servers that the run does not start."""
        return not self.needs_model

    @property
    def returns_tokens(self) -> bool:
        """True if responses have token ids and log-probabilities, which training requires."""
        return True

    @property
    def loads_policies(self) -> bool:
        """True if the engine can load the trained policies of this project."""
        return True

    @property
    def serves_roles(self) -> bool:
        """True if it can generate with an adapter for each role (`model.lora.roles`)."""
        return False

    @property
    def short_adapters(self) -> bool:
        """True if it computes with adapters in 16 bits only on a GPU."""
        return False

    @property
    def loads_weights(self) -> bool:
        """True if its server can be given all weights of a policy."""
        return False

    @property
    def ends_reasoning(self) -> bool:
        """True if it can end the reasoning of a response (`Sampling.max_thinking_tokens`)."""
        return False

    @property
    def completes_responses(self) -> bool:
        """True if it can complete a response from its first tokens (`ChatRequest.start`)."""
        return False

    @property
    def environment(self) -> ServerEnvironment | None:
        """Environment of the server that a stage starts on its machine; None if it starts none."""
        return None

    @abstractmethod
    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys."""

    @abstractmethod
    def build(self, model: ModelSpec, host: EngineHost) -> ModelEngine:
        """Return the engine of a model, checked to be usable. Raises ResourceError and EngineError."""

    def build_roles(self, model: ModelSpec, host: EngineHost, roles: Sequence[str]) -> ModelEngine:
        """Return the engine of a policy with an adapter for each of these roles. Raises SpecError unless `serves_roles`
        is True."""
        raise SpecError([self.refuses_roles(roles)])

    def refuses_roles(self, roles: Sequence[str]) -> Problem:
        """Return the problem of an engine with one adapter at a time."""
        text = f"{self.name}: has one adapter at a time, but model.lora.roles = [{', '.join(roles)}]"
        return Problem("inference.name", f"{text}; expected embedded, or model.lora.roles=null")

    def check_prerequisites(self) -> None:
        """Raise ResourceError if something is missing without which the engine cannot be built: an API key, or the
        environment of its server."""

    def check_model(self, model: ModelSpec, base_dir: Path) -> None:
        """Raise ResourceError if the engine cannot generate with the adapters that `model` trains. base_dir: folder of
        the model."""

    def lacks_tokens(self, use: str) -> Problem:
        """Return the problem of an engine without token ids. use: what needs them."""
        return Problem("inference.name", f"{self.name}: returns no token ids, but {use}; expected another engine")

    def sized(self, rank: int, requests: int) -> EngineSpec:
        """Return the spec of an engine that loads adapters of this rank (0: none) and gets up to `requests` requests at
        a time."""
        return self

    def start(self, model: ModelSpec, host: EngineHost) -> None:
        """Begin to start the engine's server in the background, if it has one, before a stage needs it."""

    def share(self, model: ModelSpec, host: EngineHost) -> EngineSpec:
        """Return the spec for another process on this machine, which uses the server of this process if there is
        one."""
        return self

    def speed(self, root: Path, *, gpu: bool) -> Speed | None:
        """Return the measured speed of an engine that a run starts below `root`; None if unknown."""
        return None

    def notes(self) -> Iterator[str]:
        """Yield messages for the plan on how the engine generates."""
        yield from ()

    def problems(self, *, rounds: int, lora_rank: int, min_p: float, top_p: float, overlap: int) -> Iterator[Problem]:
        """Yield the problems of the engine with the rest of an experiment.

        lora_rank: 0 without an adapter. min_p, top_p: of the collection. overlap: largest number of
        rounds between the policy that collects and the one in training."""
        yield from ()
