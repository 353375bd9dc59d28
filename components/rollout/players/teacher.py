"""Teacher and student: where the policy had no success, another model plays the same scenario.

The teacher's episode is sample `group_size + SAMPLE` of the scenario, in the group of the policy's own: it began alike.
It was not sampled by the policy, and says so (`policy`: teacher): what is learned from it is shown, not reinforced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from components.environments.protocol import Environment
from components.inference.protocol import Engine, Sampling
from components.rollout.players.player import Attempt, episode_number
from components.rollout.spec import CollectTeacherSpec
from components.trajectories.parts import TEACHER
from components.trajectories.schema import Scenario, Trajectory


class Taught:
    """Makes an attempt, and where the spec says so one by the teacher. engine: the teacher's. group_size: of the
    collection."""

    def __init__(self, attempt: Attempt, spec: CollectTeacherSpec, engine: Engine, group_size: int):
        self._attempt = attempt
        self._spec = spec
        self._teacher = engine
        self._group_size = group_size

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
        """patience: holds for each of the two."""
        how: dict[str, Any] = {"max_turns": max_turns, **patience}
        first = await self._attempt(engine, environment, scenario, sample=sample, sampling=sampling, seed=seed, **how)
        if not self.following(first):
            return [first]
        own = Sampling(self._spec.temperature, self._spec.top_p, max_tokens=sampling.max_tokens)
        number, seed = self._group_size + sample, episode_number(seed, TEACHER)
        shown = await self._attempt(self._teacher, environment, scenario, sample=number, sampling=own, seed=seed, **how)
        return [first, replace(shown, policy=TEACHER)]

    def following(self, first: Trajectory) -> list[str]:
        """The teacher's episode, where there is to be one."""
        asked = first.sample < self._spec.samples and not (self._spec.only_failed and first.success)
        shown = first.failure is None and asked
        return [f"{first.scenario.id}/{self._group_size + first.sample}"] if shown else []
