"""Monte Carlo continuation: step labels estimated by rollouts from each step (Math-Shepherd, arXiv:2312.08935).

After an episode ends, the policy continues `count` times from each step but the last. A step's label is its share of
successful continuations; the last step's label is the success of the episode. The labels are metrics of the episode,
`continued/0`, `continued/1` and so on, one per turn. Process reward model heads learn them by the name `continued`, and
the reward `continued` turns them into step rewards. The metrics `continuations` and `continued_tokens` count the
continuations and their sampled tokens.

An environment that can save its state is restored (`protocol.Restorable`). Any other environment is reset and the
actions are replayed. The protocol requires the same observations; otherwise a SpecError names the environment.

Continuations are not training data. A conversation continues from its own tokens, which are cached in the engine that
sampled them. Therefore an episode without labels is replayed from its start, and the last step is continued first:
its conversation contains all responses that the other continuations start from.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from components.environments.protocol import Environment, Restorable
from components.errors import Problem, SpecError
from components.inference.protocol import Engine
from components.rollout.agent import AgentLoop, Episode, as_messages, as_step
from components.rollout.players.player import Agent, Player, PlayerSpec
from components.rollout.request import EpisodeRequest, derived_seed
from components.trajectories import step_labels
from components.trajectories.groups import aside
from components.trajectories.schema import Scenario, Trajectory
from components.trajectories.step_labels import CONTINUATIONS, CONTINUED, CONTINUED_TOKENS


class ContinuationSpec(PlayerSpec):
    """Continuations from each step of an episode."""

    key: ClassVar[str] = "continuations"
    by_action: ClassVar[bool] = True

    count: int = Field(ge=1)

    def derived(self, group_size: int, max_turns: int) -> int:
        return group_size * (max_turns - 1) * self.count

    def build(self, agent: Agent, engine: Engine, second: Engine | None, group_size: int) -> Player:
        assert isinstance(agent, AgentLoop)
        return ContinuationPlayer(agent, self.count)


class ContinuationPlayer(Player):
    """Player of an episode by the agent loop, with `count` continuations from each of its steps."""

    def __init__(self, agent: AgentLoop, count: int):
        super().__init__(agent)
        self._presentation = agent.presentation
        self._count = count

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> list[Trajectory]:
        """Play the episode and its continuations. Return the labelled episode, or the unlabelled episode and the failed
        continuation."""
        episode = Episode(engine, environment, request, self._presentation)
        steps: list[tuple[Episode, str | None]] = []
        async with episode.within():
            await episode.begin()
            while not episode.ended:
                await episode.turn()
                steps.append((episode.branch(request), await _saved(episode)))
        first = episode.trajectory()
        if first.failure is not None:
            return [first]
        labels = [float(first.success)] if steps else []
        episodes = tokens = 0.0
        scenario = aside(request.scenario, CONTINUED)
        for turn, (step, state) in reversed([*enumerate(steps[:-1])]):
            wins = 0
            for number in range(self._count):
                seed = derived_seed(request.seed, f"{turn}/{number}")
                continuation = step.branch(replace(request, scenario=scenario, seed=seed))
                async with continuation.within():
                    await _return_to(continuation, request.scenario, state)
                    while not continuation.ended:
                        await continuation.turn()
                end = continuation.trajectory()
                episodes += 1
                tokens += continuation.talk.sampled - step.talk.sampled
                if end.failure is not None:
                    return [first, end]
                wins += end.success
            labels.insert(0, wins / self._count)
        counts = {CONTINUATIONS: episodes, CONTINUED_TOKENS: tokens}
        return [replace(first, metrics=first.metrics | step_labels.written(CONTINUED, labels) | counts)]

    def following(self, first: Trajectory) -> list[str]:
        """Return the id of the failed continuation if the turns of the episode have no labels."""
        labelled = step_labels.read(CONTINUED, first) or not first.metrics["turns"]
        return [] if labelled else [f"{aside(first.scenario, CONTINUED).id}/{first.sample}"]


async def _saved(episode: Episode) -> str | None:
    """Return the environment's serialized state; None if it cannot save."""
    environment = episode.environment
    return json.dumps(await episode.world("save", environment.save)) if isinstance(environment, Restorable) else None


async def _return_to(step: Episode, scenario: Scenario, state: str | None) -> None:
    """Restore the environment to its state after a step. Raises SpecError if replaying the actions gives other
    results."""
    environment = step.environment
    if state is not None:
        await step.world("restore", environment.restore, scenario, json.loads(state))  # type: ignore[attr-defined]
        return
    same = as_messages(await step.world("reset", environment.reset, scenario), "reset") == step.first
    for action, before in step.steps:
        same = same and as_step(await step.world("a step", environment.step, action)) == before
    if not same:
        raise SpecError([Problem("environment", _NOT_REPRODUCIBLE.format(type(environment).__name__, scenario.id))])


_NOT_REPRODUCIBLE = (
    "{} gave other observations or rewards when the actions of scenario {} were replayed, so its steps cannot be "
    "continued; expected equal results, or methods `save` and `restore` (components.environments.protocol.Restorable)"
)
