"""Players: ways to play a scenario, with derived episodes.

An attempt is one episode: of the agent loop (`agent.play`), of several roles (`roles`), or of a custom agent. A player
makes one or more attempts. Derived episodes are returned with the first one: they run in the same environment after it,
and are stored or retried together with it.

Derived episodes that began differently form a group of their own: their scenario has another id
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
"""Callable with the signature of `agent.play`: (engine, environment, scenario, sample=, sampling=, max_turns=, seed=,
timeout=, and optionally step_timeout= and raise_unreachable=)."""


class Player(Protocol):
    """A way to play a scenario."""

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
        """Return the episode `scenario.id/sample`, followed by the episodes derived from it. patience: `timeout`, and
        optionally `step_timeout` and `raise_unreachable` (`agent.play`)."""
        ...

    def following(self, first: Trajectory) -> list[str]:
        """Return the ids of the episodes derived from a finished one."""
        ...


class Once:
    """A player with a single attempt per episode."""

    def __init__(self, attempt: Attempt):
        self._attempt = attempt

    async def play(
        self, engine: Engine, environment: Environment, scenario: Scenario, **options: Any
    ) -> list[Trajectory]:
        return [await self._attempt(engine, environment, scenario, **options)]

    def following(self, first: Trajectory) -> list[str]:
        return []


def episode_number(seed: int, name: str) -> int:
    """Return the seed of an episode or of a part of one, derived from the parent seed and the name only."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "big")
