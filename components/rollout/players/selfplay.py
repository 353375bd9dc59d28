"""Self-play: models play both sides of a game, each in a separate conversation (`protocol.Players`).

If the policy plays both sides, a game is two episodes: `SCENARIO/SAMPLE` of the first player and
`SCENARIO~other/SAMPLE` of the second, each with its own sampled tokens and outcome. Each side forms a group.

If another engine, such as one with the base model, plays the other side, a game is one episode of the policy, and the
opponent is part of the environment. The scenario determines the policy's side, so a group has one side only.

A game is truncated when the player to move has used up its turns. A failure applies to both sides.
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
    """Player of a two-player game. other: engine of the opponent; None: the policy's own engine. format,
    max_observation: as for `agent.play`."""

    def __init__(
        self, other: Engine | None = None, *, format: formats.Name = "native", max_observation: int = MAX_OBSERVATION
    ):
        self._other = other
        self._options: dict[str, Any] = {"format": format, "max_observation": max_observation}

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
        """Return the policy's episode, followed by the other side's if the policy plays both. max_turns: messages of
        each player."""
        policy_side = 0 if self._other is None else episode_number(0, scenario.id) % 2
        engines = [engine, engine] if self._other is None else [self._other, self._other]
        engines[policy_side] = engine
        sides = [
            Episode(
                player,
                environment,
                sampling,
                seed if place == policy_side else episode_number(seed, OTHER),
                **self._options,
            )
            for place, player in enumerate(engines)
        ]
        policy = sides[policy_side]
        async with policy.within(**patience):
            await _play(policy, sides, scenario, max_turns)
        for side in sides:
            side.failure = policy.failure
        first = policy.trajectory(scenario, sample)
        if self._other is not None:
            return [first]
        return [first, sides[1].trajectory(aside(scenario, OTHER), sample)]

    def following(self, first: Trajectory) -> list[str]:
        """Return the id of the other player's episode if the policy plays both sides."""
        return [f"{aside(first.scenario, OTHER).id}/{first.sample}"] if self._other is None else []


async def _play(watched: Episode, sides: list[Episode], scenario: Scenario, max_turns: int) -> None:
    """Play the game. `watched.awaited` names the awaited boundary."""
    environment = watched.environment
    observation, tools = await watched.start(scenario)
    names = _names(environment)
    for side, name in zip(sides, names, strict=True):
        side.talk.recorder.agent = name
    while True:
        side = sides[environment.turn]  # type: ignore[attr-defined]
        _tell(side, observation, tools)
        action = None
        while action is None:
            if side.talk.turns >= max_turns:
                return
            watched.awaited = EngineError
            action = await side.decide()
            watched.awaited = EnvironmentFailed
        step = await watched.step(action)
        side.rewards.append(step.reward)
        for player, name in zip(sides, names, strict=True):
            player.outcome, player.done = _outcome(step, name), step.done
        if step.done:
            _tell(side, step.observation, tools)
            return
        observation = step.observation


def _tell(side: Episode, messages: Messages, tools: formats.Tools) -> None:
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
