"""Beginnings of episodes, as the environment gives them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from components import aio
from components.environments.protocol import Environment
from components.rollout.agent import as_messages, ask
from components.rollout.tool_schemas import as_tools
from components.trajectories.schema import Scenario
from flows.certification.subject import Opening


def open_episodes(make: Callable[[], Environment], scenarios: Sequence[Scenario], count: int) -> list[Opening]:
    """Return the beginnings of `count` scenarios, drawn with a fixed seed. Raises EnvironmentFailed."""
    chosen = random.Random(0).sample(list(scenarios), min(count, len(scenarios)))

    async def read() -> list[Opening]:
        environment = make()
        try:
            openings = []
            for scenario in chosen:
                messages = as_messages(await ask(environment.reset, scenario), "reset")
                openings.append(Opening(scenario, messages, as_tools(await ask(environment.tools))))
            return openings
        finally:
            await ask(environment.close)

    return aio.run(read())
