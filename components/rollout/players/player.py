"""Players: ways to play a scenario, with derived episodes.

An agent plays one episode: the agent loop (`agent.AgentLoop`), several roles (`roles`), or a custom function
(`own_agent`). A player makes one or more attempts with an agent. Derived episodes are returned with the first one: they
run in the same environment after it, and are stored or retried together with it.

Derived episodes that began differently form a group of their own: their scenario has another id
(`components.trajectories.groups.aside`).
"""

from __future__ import annotations

from typing import Protocol

from components.environments.protocol import Environment
from components.inference.protocol import Engine
from components.rollout.request import EpisodeRequest
from components.trajectories.schema import Trajectory


class Agent(Protocol):
    """The party that acts in an episode."""

    needs_environment: bool
    """False: the agent ignores the environment, and none is built for it."""
    holds_environment: bool
    """True: the agent calls the environment itself. After a failure, the state of the instance is unknown; after a
    timeout, a thread may still use it."""

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> Trajectory:
        """Play one episode with the engine's loaded policy and return its trajectory. Failures and timeouts are
        recorded in it; cancellation, SpecError and ResourceError propagate."""
        ...


class Player:
    """A way to play a scenario. This one makes a single attempt."""

    def __init__(self, agent: Agent):
        self.agent = agent

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> list[Trajectory]:
        """Return the requested episode, followed by the episodes derived from it. The request's time limits apply to
        each of them."""
        return [await self.agent.play(engine, environment, request)]

    def following(self, first: Trajectory) -> list[str]:
        """Return the ids of the episodes derived from a finished one."""
        return []
