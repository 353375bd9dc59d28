"""Teacher episodes: another model plays the scenarios that the policy failed.

The teacher's episode is sample `group_size + SAMPLE` of the scenario, in the policy's group, because it starts from the
same prompt. Its `policy` is `teacher`: algorithms imitate it as a demonstration and do not reinforce it.
"""

from __future__ import annotations

from dataclasses import replace

from components.environments.protocol import Environment
from components.inference.protocol import Engine, Sampling
from components.rollout.players.player import Agent, Player
from components.rollout.request import EpisodeRequest, derived_seed
from components.rollout.spec import CollectTeacherSpec
from components.trajectories.parts import TEACHER
from components.trajectories.schema import Trajectory


class TeacherPlayer(Player):
    """Player of an attempt and, as the spec requires, a second one by the teacher. engine: engine of the teacher.
    group_size: episodes per scenario of the collection."""

    def __init__(self, agent: Agent, spec: CollectTeacherSpec, engine: Engine, group_size: int):
        super().__init__(agent)
        self._spec = spec
        self._teacher = engine
        self._group_size = group_size

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> list[Trajectory]:
        """Return the policy's episode, followed by the teacher's if required."""
        first = await self.agent.play(engine, environment, request)
        if not self.following(first):
            return [first]
        teacher_request = replace(
            request,
            sample=self._group_size + request.sample,
            seed=derived_seed(request.seed, TEACHER),
            sampling=Sampling(self._spec.temperature, self._spec.top_p, max_tokens=request.sampling.max_tokens),
        )
        demonstration = await self.agent.play(self._teacher, environment, teacher_request)
        return [first, replace(demonstration, policy=TEACHER)]

    def following(self, first: Trajectory) -> list[str]:
        """Return the id of the teacher's episode if one is required."""
        required = first.sample < self._spec.samples and not (self._spec.only_failed and first.success)
        demonstrated = first.failure is None and required
        return [f"{first.scenario.id}/{self._group_size + first.sample}"] if demonstrated else []
