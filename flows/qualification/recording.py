"""Recorded episodes: what an environment showed and what was done in it, so that an episode can be replayed.

An instance is driven directly, without a model and without the agent's format. `TestedInstance` calls synchronous
and asynchronous environments alike and validates what they return.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.environments.protocol import Environment, Messages, Players, Restorable, Solver, Step
from components.errors import Problem, SpecError
from components.rollout.agent import as_json, as_messages, as_step, ask
from components.rollout.random_agent import legal_actions
from components.rollout.tool_schemas import as_tools
from components.trajectories.convert import to_message
from components.trajectories.schema import History, Scenario, Trajectory

Action = dict[str, Any]


@dataclass
class Recording:
    """One episode: initial messages, tools, actions and results."""

    scenario: Scenario
    player: str
    """Name of what acts: `solver`, `chance`, or the name of an exploit."""
    first: Messages
    tools: list[dict[str, Any]]
    actions: list[Action] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def success(self) -> bool:
        """True if the last step reports success."""
        return bool(self.steps and self.steps[-1].info.get("success"))

    @property
    def reward(self) -> float:
        """Sum of the rewards of the steps."""
        return sum(step.reward for step in self.steps)

    def results(self) -> list[Any]:
        """Return everything that the environment returned, as comparable data."""
        return [[self.first, self.tools], *([*_plain(step)] for step in self.steps)]

    def conversation(self) -> Messages:
        """Return all messages of the episode, over all of its contexts."""
        messages = list(self.first)
        for action, step in zip(self.actions, self.steps, strict=True):
            messages += [action, *step.observation]
        return messages

    def trajectory(self) -> Trajectory:
        """Return the episode as a trajectory without tokens."""
        contexts = [list(self.first)]
        for action, step in zip(self.actions, self.steps, strict=True):
            contexts[-1].append(action)
            if step.new_context:
                contexts.append([])
            contexts[-1] += step.observation
        return Trajectory(
            id=f"{self.scenario.id}/{self.player}",
            scenario=self.scenario,
            sample=0,
            histories=[History([to_message(message) for message in messages]) for messages in contexts],
            tools=self.tools,
            step_rewards=[step.reward for step in self.steps],
            outcome=self.steps[-1].info if self.steps else {},
            metrics={"turns": float(len(self.actions))},
            policy=self.player,
            reward=self.reward,
        )


def _plain(step: Step) -> list[Any]:
    return [step.observation, step.reward, step.done, step.new_context, step.info]


def first_difference(expected: Recording, actual: Recording) -> str:
    """Return a description of the first difference of two episodes with the same actions; empty if they are equal."""
    pairs = zip(expected.results(), actual.results(), strict=False)
    for number, (one_result, other_result) in enumerate(pairs):
        if one_result != other_result:
            place = f"step {number}" if number else "reset"
            return f"{place}: {one_result!r:.300} became {other_result!r:.300}"
    if len(expected.steps) != len(actual.steps):
        return f"the episode has {len(actual.steps)} steps; it had {len(expected.steps)}"
    return ""


class TestedInstance:
    """One instance of an environment."""

    def __init__(self, environment: Environment):
        self.environment = environment

    async def scenarios(self, split: str) -> list[Scenario]:
        """Return the scenarios of a split."""
        return list(await ask(self.environment.scenarios, split))

    async def reset(self, scenario: Scenario, player: str) -> Recording:
        """Start an episode. Raises SpecError if several policies play it."""
        first = as_messages(await ask(self.environment.reset, scenario), "reset")
        tools = as_tools(await ask(self.environment.tools))
        if isinstance(self.environment, Players) and len(self.environment.players) > 1:
            names = " and ".join(self.environment.players)
            text = f"wants {names} played; expected environment.opponent with an opponent of the environment"
            raise SpecError([Problem("environment.opponent", text)])
        return Recording(scenario, player, first, tools)

    async def step(self, recording: Recording, action: Action) -> Step:
        """Execute an action and record it."""
        step = as_step(await ask(self.environment.step, action))
        recording.actions.append(action)
        recording.steps.append(step)
        return step

    async def replay(self, original: Recording) -> Recording:
        """Play the actions of a recorded episode again."""
        recording = await self.reset(original.scenario, original.player)
        for action in original.actions:
            if (await self.step(recording, action)).done:
                break
        return recording

    async def solve(self, scenario: Scenario) -> list[Action]:
        """Return the environment's solution; call it after `reset`."""
        assert isinstance(self.environment, Solver)
        return as_messages(await ask(self.environment.solve, scenario), "solve")

    async def legal_actions(self) -> Sequence[str]:
        """Return the legal actions, if the environment lists them."""
        return await legal_actions(self.environment)

    async def save(self) -> Any:
        """Return the state of the episode, as JSON data."""
        assert isinstance(self.environment, Restorable)
        return as_json(await ask(self.environment.save), "save")

    async def restore(self, scenario: Scenario, state: Any) -> None:
        """Restore a saved state."""
        assert isinstance(self.environment, Restorable)
        await ask(self.environment.restore, scenario, state)

    async def close(self) -> None:
        """Close the instance."""
        await ask(self.environment.close)


Policy = Callable[[TestedInstance, Recording], Awaitable[Action | None]]
"""Function that returns the next action of an episode, or None to end it."""


async def play(world: TestedInstance, scenario: Scenario, player: str, policy: Policy, turns: int) -> Recording:
    """Play an episode until it is done, the policy ends it, or the turns are used up."""
    recording = await world.reset(scenario, player)
    for _ in range(turns):
        action = await policy(world, recording)
        if action is None or (await world.step(recording, action)).done:
            break
    return recording


async def play_solution(world: TestedInstance, scenario: Scenario) -> Recording:
    """Play the environment's own solution."""
    recording = await world.reset(scenario, "solver")
    for action in await world.solve(scenario):
        if (await world.step(recording, action)).done:
            break
    return recording
