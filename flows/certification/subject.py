"""Subject of a certificate: model, engine, trainer and settings that the checks use together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components import aio
from components.deployment.answers import TOLERANCE
from components.environments.protocol import Environment, Messages
from components.errors import WaitTimeout
from components.inference.protocol import ModelEngine, Sampling
from components.models.spec import ModelSpec
from components.rollout import formats
from components.rollout.action_format import Format, Tools
from components.rollout.agent import as_messages, ask
from components.rollout.observations import cleaned
from components.rollout.spec import AgentSpec
from components.rollout.tool_schemas import as_tools
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Scenario

if TYPE_CHECKING:
    from components.algorithms.policy.policy import Policy

SEPARATE_ENGINE = 2.0
"""Factor of the tolerance for an engine with its own implementation of the model."""
MEAN_SHARE = 0.1
"""Tolerance of the mean difference, as a share of that of the largest difference."""


@dataclass(frozen=True)
class Opening:
    """Beginning of an episode, as the environment gives it."""

    scenario: Scenario
    messages: Messages
    tools: Tools


@dataclass
class Subject:
    """Everything that the checks need."""

    model: ModelSpec
    agent: AgentSpec
    sampling: Sampling
    """Sampling parameters of the experiment's collection."""
    base_dir: Path
    """Local folder of the base model."""
    openings: Sequence[Opening]
    deliver: Callable[[Path | None], ModelEngine]
    """Function that loads trained weights from a folder into the engine as a run does, and returns the engine; None
    loads the base model."""
    in_process: bool
    """True if the engine computes with the trainer's implementation of the model."""
    returns_tokens: bool
    """True if the engine returns token ids and log-probabilities."""
    loads_policies: bool
    """True if the engine can load trained weights."""
    scratch: Path
    make_environment: Callable[[], Environment]
    played: Sequence[Scenario]
    """Scenarios that solver and chance play."""
    timeout: float
    """Maximum time of the episodes of one check, in seconds."""
    samples: int = 1
    """Completions per opening."""

    @cached_property
    def chat(self) -> ChatFormat:
        """The model's chat template."""
        from components.models.weights import load_tokenizer

        return ChatFormat(load_tokenizer(self.base_dir))

    @cached_property
    def trainer(self) -> Policy:
        """The policy as the trainer loads it, with the weights of the base model."""
        from components.algorithms.policy.policy import Policy

        policy = Policy(self.base_dir, self.model, seed=0)
        policy.use_reference(None)
        return policy

    @property
    def tolerance(self) -> float:
        """Largest accepted difference of two log-probabilities of a token, in nats."""
        return TOLERANCE[self.model.dtype] * (1 if self.in_process else SEPARATE_ENGINE)

    @property
    def mean_tolerance(self) -> float:
        """Largest accepted mean difference, in nats."""
        return self.tolerance * MEAN_SHARE

    def format(self) -> Format:
        """Return the action format of a new episode."""
        return formats.make(self.agent.format, self.agent.limits())

    def opened(self, opening: Opening) -> tuple[Messages, Tools]:
        """Return the first messages and the tools that the engine is given."""
        return self.format().opening(cleaned(opening.messages, self.agent.max_observation)[0], opening.tools)


def call_message(calls: Sequence[tuple[str, str]], content: str = "") -> dict[str, Any]:
    """Return an action that calls tools. calls: name and arguments (JSON text) of each."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": f"call_0_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ],
    }


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's format. properties: JSON schemas of its arguments."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def draw(scenarios: Sequence[Scenario], count: int) -> list[Scenario]:
    """Return `count` scenarios, drawn with a fixed seed: the first ones are those of a smaller draw."""
    numbers = list(range(len(scenarios)))
    random.Random(0).shuffle(numbers)
    return [scenarios[number] for number in numbers[:count]]


def open_episodes(make: Callable[[], Environment], scenarios: Sequence[Scenario], timeout: float) -> list[Opening]:
    """Return the beginnings of these scenarios. Raises EnvironmentFailed, and WaitTimeout after `timeout` seconds."""

    async def read() -> list[Opening]:
        environment = make()
        try:
            openings = []
            async with asyncio.timeout(timeout):
                for scenario in scenarios:
                    messages = as_messages(await ask(environment.reset, scenario), "reset")
                    openings.append(Opening(scenario, messages, as_tools(await ask(environment.tools))))
            return openings
        except TimeoutError:
            text = f"reset of {len(scenarios)} scenarios took longer than {timeout:g} s (collect.timeout)"
            raise WaitTimeout(text) from None
        finally:
            await ask(environment.close)

    return aio.run(read())
