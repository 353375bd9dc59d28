"""Monte Carlo continuation: how good a step was, by what the policy makes of it (Math-Shepherd, arXiv:2312.08935).

After an episode has come to its end, each of its steps but the last is returned to, and the policy plays on from there
so many times. The share of successes is the label of the step; that of the last step is the episode's own success. The
labels are metrics of the episode, `continued/0`, `continued/1` and so on, one for each turn: heads of a process reward
model learn them by the name `continued`, and the reward `continued` makes step rewards of them. How many continuations
there were and what they sampled stands beside them (`continuations`, `continued_tokens`).

An environment that can save is restored (`protocol.Restorable`). Any other is reset and given the actions again: by the
protocol it then says the same again, and one that does not is refused by name.

What is played on is measured and not trained on. The conversation goes on from its own tokens, which the engine that
gave them remembers: so an episode whose labels are not there yet is played again as a whole, and the last step is
continued first, whose conversation names all answers that the others go on from.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from components.environments.protocol import Environment, Restorable
from components.errors import Problem, SpecError
from components.inference.protocol import Engine, Sampling
from components.rollout import formats
from components.rollout.agent import MAX_OBSERVATION, Episode, as_messages, as_step
from components.rollout.players.player import episode_number
from components.trajectories import step_labels
from components.trajectories.groups import aside
from components.trajectories.schema import Scenario, Trajectory
from components.trajectories.step_labels import CONTINUATIONS, CONTINUED, CONTINUED_TOKENS


class Continuing:
    """Plays an episode by the agent loop, and on from each of its steps `count` times. format, max_observation: as
    those of `agent.play`."""

    def __init__(self, count: int, *, format: formats.Name = "native", max_observation: int = MAX_OBSERVATION):
        self._count = count
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
        """patience: holds for the episode, and for each continuation. One that fails is returned after the episode,
        which then has no labels."""
        episode = Episode(engine, environment, sampling, seed, **self._how)
        steps: list[tuple[Episode, str | None]] = []
        async with episode.within(**patience):
            await episode.begin(scenario)
            while not episode.done and episode.talk.turns < max_turns:
                await episode.turn()
                steps.append((episode.branch(seed), await _saved(episode)))
        first = episode.trajectory(scenario, sample)
        if first.failure is not None:
            return [first]
        labels = [float(first.success)]
        episodes = tokens = 0.0
        for turn, (step, state) in reversed([*enumerate(steps[:-1])]):
            wins = 0
            for number in range(self._count):
                going_on = step.branch(episode_number(seed, f"{turn}/{number}"))
                async with going_on.within(**patience):
                    await _return_to(going_on, scenario, state)
                    while not going_on.done and going_on.talk.turns < max_turns:
                        await going_on.turn()
                end = going_on.trajectory(aside(scenario, CONTINUED), sample)
                episodes += 1
                tokens += going_on.talk.sampled - step.talk.sampled
                if end.failure is not None:
                    return [first, end]
                wins += end.success
            labels.insert(0, wins / self._count)
        counts = {CONTINUATIONS: episodes, CONTINUED_TOKENS: tokens}
        return [replace(first, metrics=first.metrics | step_labels.written(CONTINUED, labels) | counts)]

    def following(self, first: Trajectory) -> list[str]:
        """A continuation that failed, of an episode without labels."""
        labelled = step_labels.read(CONTINUED, first)
        return [] if labelled else [f"{aside(first.scenario, CONTINUED).id}/{first.sample}"]


async def _saved(episode: Episode) -> str | None:
    """Where the environment is now; None of one that cannot save."""
    environment = episode.environment
    return json.dumps(await episode.world("save", environment.save)) if isinstance(environment, Restorable) else None


async def _return_to(step: Episode, scenario: Scenario, state: str | None) -> None:
    """Puts the environment where it was after a step. Raises SpecError where its actions do not lead there again."""
    environment = step.environment
    if state is not None:
        await step.world("restore", environment.restore, scenario, json.loads(state))  # type: ignore[attr-defined]
        return
    same = as_messages(await step.world("reset", environment.reset, scenario), "reset") == step.first
    for action, before in step.steps:
        same = same and as_step(await step.world("a step", environment.step, action)) == before
    if not same:
        raise SpecError([Problem("environment", _NOT_AGAIN.format(type(environment).__name__, scenario.id))])


_NOT_AGAIN = (
    "{} said something else when scenario {} was played again with the same actions, so that no step of it can be "
    "returned to: expected the same, or methods `save` and `restore` (components.environments.protocol.Restorable)"
)
