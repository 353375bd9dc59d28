"""Teacher episodes: another model plays the scenarios that the policy failed.

The teacher's episode is sample `group_size + SAMPLE` of the scenario, in the policy's group, because it starts from the
same prompt. Its `policy` is `teacher`: algorithms imitate it as a demonstration and do not reinforce it.
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
    """Player of an attempt and, as the spec requires, a second one by the teacher. engine: engine of the teacher.
    group_size: episodes per scenario of the collection."""

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
        """Return the policy's episode, followed by the teacher's if required. patience: time limits of each of the
        two."""
        options: dict[str, Any] = {"max_turns": max_turns, **patience}
        first = await self._attempt(
            engine, environment, scenario, sample=sample, sampling=sampling, seed=seed, **options
        )
        if not self.following(first):
            return [first]
        teacher_sampling = Sampling(self._spec.temperature, self._spec.top_p, max_tokens=sampling.max_tokens)
        number, seed = self._group_size + sample, episode_number(seed, TEACHER)
        demonstration = await self._attempt(
            self._teacher, environment, scenario, sample=number, sampling=teacher_sampling, seed=seed, **options
        )
        return [first, replace(demonstration, policy=TEACHER)]

    def following(self, first: Trajectory) -> list[str]:
        """Return the id of the teacher's episode if one is required."""
        required = first.sample < self._spec.samples and not (self._spec.only_failed and first.success)
        demonstrated = first.failure is None and required
        return [f"{first.scenario.id}/{self._group_size + first.sample}"] if demonstrated else []
