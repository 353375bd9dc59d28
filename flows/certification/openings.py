"""Beginnings of episodes, as the environment gives them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from components import aio
from components.environments.protocol import Environment
from components.errors import WaitTimeout
from components.rollout.agent import as_messages, ask
from components.rollout.tool_schemas import as_tools
from components.trajectories.schema import Scenario
from flows.certification.subject import Opening


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
