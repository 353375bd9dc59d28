"""Self-play: models play both sides of a game, each in a separate conversation (`protocol.Players`).

If the policy plays both sides, a game is two episodes: `SCENARIO/SAMPLE` of the first player and
`SCENARIO~other/SAMPLE` of the second, each with its own sampled tokens and outcome. Each side forms a group.

If another engine, such as one with the base model, plays the other side, a game is one episode of the policy, and the
opponent is part of the environment. The scenario determines the policy's side, so a group has one side only.

A game is truncated when the player to move has used up its turns or its context. Truncation and failure apply to both
sides.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

from components.environments.protocol import Environment, Messages, Players, Step
from components.errors import EngineError, EnvironmentFailed, Problem, SpecError
from components.inference.protocol import Engine
from components.inference.spec import InferenceSpec
from components.models.spec import ModelSpec
from components.rollout.agent import AgentLoop, Episode, as_step, refuse_new_context
from components.rollout.formats import Tools
from components.rollout.players.player import Agent, Player, PlayerSpec, PlaySetup, SecondModel
from components.rollout.request import EpisodeRequest, derived_seed
from components.trajectories.groups import aside
from components.trajectories.schema import Trajectory
from components.trajectories.truncation import TURNS

OTHER = "other"
"""Name of the group of the second player's episodes."""


class SelfPlaySpec(PlayerSpec):
    """The opponent in a two-player game."""

    key: ClassVar[str] = "opponent"
    by_action: ClassVar[bool] = True
    both_sides: ClassVar[bool] = True

    opponent: Literal["policy", "base"]

    def problems(self, setup: PlaySetup) -> Iterator[Problem]:
        yield from super().problems(setup)
        if "opponent" not in inspect.signature(setup.environment.factory()).parameters:
            yield self.problem(
                f"{self.opponent}: {setup.environment.target} has no parameter `opponent`; expected environment, or a "
                "game with two sides, such as environment=tictactoe"
            )

    def derived(self, group_size: int, max_turns: int) -> int:
        return group_size if self.opponent == "policy" else 0

    def second_model(self, model: ModelSpec, inference: InferenceSpec) -> SecondModel | None:
        return SecondModel("opponent", model, inference) if self.opponent == "base" else None

    def build(self, agent: Agent, engine: Engine, second: Engine | None, group_size: int) -> Player:
        assert isinstance(agent, AgentLoop)
        return SelfPlay(agent, second)


class SelfPlay(Player):
    """Player of a two-player game. other: engine of the opponent; None: the policy's own engine."""

    def __init__(self, agent: AgentLoop, other: Engine | None = None):
        super().__init__(agent)
        self._presentation = agent.presentation
        self._other = other

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> list[Trajectory]:
        """Return the policy's episode, followed by the other side's if the policy plays both. `request.max_turns`
        limits the messages of each player."""
        policy = Episode(engine, environment, request, self._presentation)
        other = Episode(self._other or engine, environment, request.aside(OTHER), self._presentation)
        policy_is_second = self._other is not None and derived_seed(0, request.scenario.id) % 2 == 1
        async with policy.within():
            await _play(policy, [other, policy] if policy_is_second else [policy, other])
        other.failure, other.limit = policy.failure, policy.limit
        first = policy.trajectory()
        return [first] if self._other is not None else [first, other.trajectory()]

    def following(self, first: Trajectory) -> list[str]:
        """Return the id of the other player's episode if the policy plays both sides."""
        return [f"{aside(first.scenario, OTHER).id}/{first.sample}"] if self._other is None else []


async def _play(watched: Episode, sides: list[Episode]) -> None:
    """Play the game. `watched.awaited` names the awaited boundary."""
    environment = watched.environment
    observation, tools = await watched.start()
    names = _names(environment)
    for side, name in zip(sides, names, strict=True):
        side.talk.recorder.agent = name
    while True:
        side = sides[environment.turn]  # type: ignore[attr-defined]
        _tell(side, observation, tools)
        action = None
        while action is None:
            if side.talk.turns >= side.request.max_turns:
                watched.limit = TURNS
                return
            watched.awaited = EngineError
            action = await side.decide()
            watched.awaited = EnvironmentFailed
        step = await watched.step(action)
        refuse_new_context(step)
        side.rewards.append(step.reward)
        for player, name in zip(sides, names, strict=True):
            player.outcome, player.done = _outcome(step, name), step.done
        if step.done:
            _tell(side, step.observation, tools)
            return
        observation = step.observation


def _tell(side: Episode, messages: Messages, tools: Tools) -> None:
    """Show messages to a player; the first ones open its conversation."""
    if side.talk.messages:
        side.hear(messages)
    else:
        side.open(messages, tools)


def _names(environment: Environment) -> list[str]:
    """Return the names of the two players. Raises SpecError if the environment has another number of players."""
    names = list(environment.players) if isinstance(environment, Players) else []
    if len(names) != 2:
        problem = f"{type(environment).__name__} has {len(names)} players to be played" if names else "has no players"
        raise SpecError(
            [Problem("collect.opponent", f"the environment {problem}; expected two, or opponent: environment")]
        )
    return names


def _outcome(step: Step, name: str) -> dict[str, Any]:
    """Return one player's outcome of a step. Raises EnvironmentFailed if it is missing."""
    players = step.info.get("players")
    if not isinstance(players, dict) or not isinstance(players.get(name), dict):
        raise EnvironmentFailed(f"step returned no info['players'][{name!r}], the outcome of a player")
    return as_step(replace(step, observation=[], info=players[name])).info
