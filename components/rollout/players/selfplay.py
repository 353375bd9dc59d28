"""Self-play: both sides of a game are played by models, each in a conversation of its own (`protocol.Players`).

With the policy on both sides, a game is two episodes: that of the first player, `SCENARIO/SAMPLE`, and that of the
other one, `SCENARIO~other/SAMPLE`, each with its own sampled tokens and its own outcome. Those of one side are
compared with each other.

With another engine for the other side, such as one that holds the base model, a game is one episode of the policy; what
the other says is part of the environment. Which side the policy takes follows from the scenario, so that a group holds
one side only.

A game ends as it stands when the player whose turn it is has used up its turns. What fails is a failure of both sides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from components.environments.protocol import Environment, Messages, Players, Step
from components.errors import EngineError, EnvironmentFailed, Problem, SpecError
from components.inference.protocol import Engine, Sampling
from components.rollout import formats
from components.rollout.agent import MAX_OBSERVATION, Episode, as_step
from components.rollout.players.player import episode_number
from components.trajectories.groups import aside
from components.trajectories.schema import Scenario, Trajectory

OTHER = "other"
"""Name of the group of the second player's episodes."""


class SelfPlay:
    """other: engine of the other side; None: the policy's own. format, max_observation: as those of `agent.play`."""

    def __init__(
        self, other: Engine | None = None, *, format: formats.Name = "native", max_observation: int = MAX_OBSERVATION
    ):
        self._other = other
        self._how: dict[str, Any] = {"format": format, "max_observation": max_observation}

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
        """max_turns: of each player."""
        policys = 0 if self._other is None else episode_number(0, scenario.id) % 2
        engines = [engine, engine] if self._other is None else [self._other, self._other]
        engines[policys] = engine
        sides = [
            Episode(one, environment, sampling, seed if place == policys else episode_number(seed, OTHER), **self._how)
            for place, one in enumerate(engines)
        ]
        policy = sides[policys]
        async with policy.within(**patience):
            await _play(policy, sides, scenario, max_turns)
        for side in sides:
            side.failure = policy.failure
        first = policy.trajectory(scenario, sample)
        if self._other is not None:
            return [first]
        return [first, sides[1].trajectory(aside(scenario, OTHER), sample)]

    def following(self, first: Trajectory) -> list[str]:
        """The episode of the other player, where that is the policy too."""
        return [f"{aside(first.scenario, OTHER).id}/{first.sample}"] if self._other is None else []


async def _play(watched: Episode, sides: list[Episode], scenario: Scenario, max_turns: int) -> None:
    """The game; `watched` is told what is waited for."""
    environment = watched.environment
    told, tools = await watched.start(scenario)
    names = _names(environment)
    for side, name in zip(sides, names, strict=True):
        side.talk.recorder.agent = name
    while True:
        side = sides[environment.turn]  # type: ignore[attr-defined]
        _tell(side, told, tools)
        action = None
        while action is None:
            if side.talk.turns >= max_turns:
                return
            watched.awaited = EngineError
            action = await side.decide()
            watched.awaited = EnvironmentFailed
        step = await watched.step(action)
        side.rewards.append(step.reward)
        for one, name in zip(sides, names, strict=True):
            one.outcome, one.done = _outcome(step, name), step.done
        if step.done:
            _tell(side, step.observation, tools)
            return
        told = step.observation


def _tell(side: Episode, told: Messages, tools: formats.Tools) -> None:
    if side.talk.messages:
        side.hear(told)
    else:
        side.open(told, tools)


def _names(environment: Environment) -> list[str]:
    """Of the two players. Raises SpecError where there are not two to be played."""
    names = list(environment.players) if isinstance(environment, Players) else []
    if len(names) != 2:
        what = f"{type(environment).__name__} has {len(names)} players to be played" if names else "has no players"
        raise SpecError(
            [Problem("collect.opponent", f"the environment {what}; expected two, or opponent: environment")]
        )
    return names


def _outcome(step: Step, name: str) -> dict[str, Any]:
    """What a step says of one player."""
    players = step.info.get("players")
    if not isinstance(players, dict) or not isinstance(players.get(name), dict):
        raise EnvironmentFailed(f"step returned no info['players'][{name!r}], the outcome of a player")
    return as_step(replace(step, observation=[], info=players[name])).info
