"""Players: ways to play a scenario, with derived episodes.

An agent plays one episode: the agent loop (`agent.AgentLoop`), several roles (`roles`), or a custom function
(`own_agent`). A player makes one or more attempts with an agent. Derived episodes are returned with the first one: they
run in the same environment after it, and are stored or retried together with it.

A module declares its player once: the settings (`PlayerSpec`), which say what excludes it, how many episodes it adds
and what it needs, and the player that they build. `collect_spec` selects one of them by the keys that are set.

Derived episodes that began differently form a group of their own: their scenario has another id
(`components.trajectories.groups.aside`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from components.environments.protocol import Environment
from components.errors import Problem
from components.inference.protocol import Engine
from components.inference.spec import InferenceSpec
from components.models.spec import ModelSpec
from components.rollout.request import EpisodeRequest
from components.rollout.spec import AgentSpec
from components.specs import Spec, Target
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

    def begin(self, requests: Sequence[EpisodeRequest], finished: Mapping[str, Trajectory]) -> None:
        """Receive the requests of a collection before its first episode. finished: trajectories of earlier attempts of
        the stage by id."""

    def record(self, trajectory: Trajectory) -> None:
        """Receive an episode of this attempt when it has finished."""

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> list[Trajectory]:
        """Return the requested episode, followed by the episodes derived from it. The request's time limits apply to
        each of them."""
        return [await self.agent.play(engine, environment, request)]

    def following(self, first: Trajectory) -> list[str]:
        """Return the ids of the episodes derived from a finished one."""
        return []


@dataclass(frozen=True)
class PlaySetup:
    """The part of an experiment that the settings of a player are checked against."""

    agent: AgentSpec
    environment: Target
    scenarios: int
    group_size: int
    refills: int
    sampled_only: str | None
    """Name of the algorithm if the rounds learn only from tokens that the policy sampled; otherwise None."""


class SecondModel(NamedTuple):
    """A model that plays beside the policy."""

    kind: str
    """Name of its engine in the cache of loaded engines."""
    model: ModelSpec
    inference: InferenceSpec
    adapter: Path | None = None


class PlayerSpec(Spec):
    """Settings of a player. These are for a single attempt."""

    key: ClassVar[str] = ""
    """Key of `collect` that selects the player."""
    by_action: ClassVar[bool] = False
    """True: the player resumes an episode after a single action of a single agent."""
    both_sides: ClassVar[bool] = False
    """True: models play both sides of a game, so the environment plays none."""
    whole_collection: ClassVar[str | None] = None
    """Reason why a collection cannot be split; None if it can."""

    def problems(self, setup: PlaySetup) -> Iterator[Problem]:
        """Yield the problems of these settings with the rest of the experiment."""
        if not self.key:
            return
        if setup.agent.own is not None:
            yield self.problem(f"needs the agent loop, which {setup.agent.own} replaces; expected it unset")
        if self.by_action and setup.agent.format == "code":
            yield self.problem(
                "resumes after a single action, but one code block of agent.format=code may run several; expected "
                "another format"
            )
        if self.by_action and setup.agent.roles is not None:
            yield self.problem("supports a single agent, but agent.roles has several; expected agent.roles=null")

    def excluded(self, other: PlayerSpec) -> Problem:
        """Return the problem of another player that is set besides this one."""
        return other.problem(f"cannot be combined with collect.{self.key}; expected one of them")

    def problem(self, message: str, field: str = "") -> Problem:
        """Return a problem of the player's key, or of a field below it."""
        return Problem(f"collect.{self.key}{field and '.' + field}", message)

    def derived(self, group_size: int, max_turns: int) -> int:
        """Return the maximum number of episodes derived from those of one scenario."""
        return 0

    def second_model(self, model: ModelSpec, inference: InferenceSpec) -> SecondModel | None:
        """Return the model that plays beside the policy, if any. model, inference: those of the policy."""
        return None

    def build(self, agent: Agent, engine: Engine, second: Engine | None, group_size: int) -> Player:
        """Return the player. engine: of the policy; second: of the model that plays beside it, if any."""
        return Player(agent)
