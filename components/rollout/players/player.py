"""Who plays the episodes of a collection, and what follows from an episode.

An attempt is one episode: of the agent loop (`agent.play`), of several roles (`roles`), of an agent of one's own. A
player makes attempts; most make one. One that makes more returns the further episodes with the first: they belong to
it, are played in the same environment after it, and are kept or played again with it.

Further episodes that began differently are compared among themselves: their scenario has a name of its own
(`components.trajectories.groups.aside`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from components.environments.protocol import Environment
from components.inference.protocol import Engine, Sampling
from components.trajectories.schema import Scenario, Trajectory

Attempt = Callable[..., Coroutine[Any, Any, Trajectory]]
"""Called as `agent.play` is: (engine, environment, scenario, sample=, sampling=, max_turns=, seed=, timeout=, and as
they are given step_timeout= and again=)."""


class Player(Protocol):
    async def play(
        self,
        engine: Engine,
        environment: Environment,
        scenario: Scenario,
        *,
        sample: int,
        sampling: Sampling,
        max_turns: int,
        seed: int,
        **patience: Any,
    ) -> list[Trajectory]:
        """The episode `scenario.id/sample`, and after it those that follow from it. patience: `timeout`, and
        `step_timeout` and `again` where they are given (`agent.play`)."""
        ...

    def following(self, first: Trajectory) -> list[str]:
        """Ids of the episodes that follow from a finished one."""
        ...


class Once:
    """Plays each episode once."""

    def __init__(self, attempt: Attempt):
        self._attempt = attempt

    async def play(self, engine: Engine, environment: Environment, scenario: Scenario, **how: Any) -> list[Trajectory]:
        return [await self._attempt(engine, environment, scenario, **how)]

    def following(self, first: Trajectory) -> list[str]:
        return []


def episode_number(seed: int, name: str) -> int:
    """The seed of an episode, or of a part of one: a function of the seed of the whole and of its name, not of when it
    is played."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "big")
