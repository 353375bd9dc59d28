"""Teacher episodes: another model plays the scenarios that the policy failed.

The teacher's episode is sample `group_size + SAMPLE` of the scenario, in the policy's group, because it starts from the
same prompt. Its `policy` is `teacher`: algorithms imitate it as a demonstration and do not reinforce it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from components.environments.protocol import Environment
from components.errors import Problem
from components.inference.protocol import Engine, Sampling
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import FrozenModelSpec, ModelSpec
from components.rollout.players.player import Agent, Player, PlayerSpec, PlaySetup, SecondModel
from components.rollout.request import EpisodeRequest, derived_seed
from components.trajectories.parts import TEACHER
from components.trajectories.schema import Trajectory


class CollectTeacherSpec(PlayerSpec):
    """A stronger model that plays scenarios that the policy failed. Its episodes join the policy's group, for sft,
    distill and preference algorithms. The model runs locally or on a server."""

    key: ClassVar[str] = "teacher"

    model: FrozenModelSpec | None = None
    """Teacher model for `inference.name: embedded`; null for a server, whose model `inference.model` names."""
    inference: InferenceSpec = EmbeddedSpec()
    """Engine of the teacher, as `inference`. A server needs no `tokens`: its text is tokenized with the tokenizer of
    model."""
    samples: int = Field(1, ge=1, le=10_000)
    """Number of policy episodes per scenario that a teacher episode follows."""
    only_failed: bool = True
    """The teacher follows unsuccessful episodes only."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature of the teacher, as collect.temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling of the teacher, as collect.top_p."""

    def key_part(self) -> dict[str, Any]:
        """Return the settings that determine results, for stage keys."""
        data = self.model_dump(mode="json", exclude={"model", "inference"})
        return data | {"model": self.model.key_part() if self.model else None, **self.inference.key_part()}

    def problems(self, setup: PlaySetup) -> Iterator[Problem]:
        yield from super().problems(setup)
        if setup.sampled_only:
            yield self.problem(
                f"{setup.sampled_only} learns only from tokens that the policy sampled; expected null, or "
                "algorithm=sft, distill or a preference algorithm"
            )
        if self.samples > setup.group_size:
            yield self.problem(
                f"{self.samples}: a group has collect.group_size={setup.group_size} episodes; expected at most that",
                "samples",
            )

    def derived(self, group_size: int, max_turns: int) -> int:
        return min(self.samples, group_size)

    def second_model(self, model: ModelSpec, inference: InferenceSpec) -> SecondModel | None:
        if self.model is None:
            return SecondModel("teacher", model.of_server(), self.inference)
        return SecondModel("teacher", self.model.model(model.max_length), self.inference, self.model.adapter_dir())

    def build(self, agent: Agent, engine: Engine, second: Engine | None, group_size: int) -> Player:
        assert second is not None
        return TeacherPlayer(agent, self, second, group_size)


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
