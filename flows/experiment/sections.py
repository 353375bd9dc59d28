"""Specs of the sections of an experiment that belong to no component: warmup, reward model, serve."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from components.algorithms.spec import RewardAlgorithmSpec, SFTSpec
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import TeacherSpec
from components.rewards.spec import LearnedSpec
from components.specs import Spec, Target

_KEY = re.compile(r"[A-Za-z_]\w*([./]\w+)*(@[A-Za-z_]\w*(\.\w+)*)?", re.ASCII)


class WarmupTeacherSpec(Spec):
    """A model that plays the demonstrations of the warmup: on this machine, or on a server."""

    model: TeacherSpec | None = None
    """The model, for `inference.name: embedded`; null for a server's, which `inference.model` names."""
    inference: InferenceSpec = EmbeddedSpec()
    """Engine of the teacher, as `inference`. A server needs no `tokens`: what it says is laid out in those of model."""
    samples: int = Field(1, ge=1, le=10_000)
    """Episodes of each scenario."""
    temperature: float = Field(0.7, ge=0)
    """As collect.temperature, for the teacher."""
    top_p: float = Field(1.0, gt=0, le=1)
    """As collect.top_p, for the teacher."""


class WarmupSpec(Spec):
    """Supervised training on the environment's own solutions, or on a teacher's episodes, before the first round."""

    demonstrations: int = Field(64, ge=1)
    """Train scenarios that the environment's solver demonstrates, or the teacher plays."""
    teacher: WarmupTeacherSpec | None = None
    """Who demonstrates (see warmup=teacher); null: the environment's solver."""
    filter: Target
    """Which demonstrations are trained on."""
    algorithm: SFTSpec = SFTSpec()


class RewardModelPartSpec(LearnedSpec):
    """A model of the declared reward, trained before the first round; it judges the rounds in its place. Evaluations
    keep the declared reward."""

    every: int = Field(0, ge=0)
    """It is trained further after rounds `every`, 2 · `every` and so on, but for the last one, on new episodes of the
    policy as it stands then: as many as at first, of other scenarios while there are any. 0: it stays as it is."""
    keep: Literal["all", "none"] = "all"
    """What it is trained on again then, besides the new episodes: those of all earlier collections, or nothing."""
    scenarios: int = Field(32, ge=1)
    """Train scenarios whose episodes it learns from."""
    group_size: int = Field(4, ge=1, le=10_000)
    """Episodes of each scenario, sampled from the policy as `collect` says, each tried once."""
    continuations: int = Field(0, ge=0)
    """From each step of them the policy plays on so many times, and the share of successes is the step's label, which
    the head `continued` of a process reward model learns. 0: none."""
    models: int = Field(1, ge=1)
    """How many are trained, each from another seed, and judge together (`combine`)."""
    algorithm: RewardAlgorithmSpec

    def refreshed(self, rounds: int) -> list[int]:
        """Rounds after which it is trained further, where there are so many."""
        return [number for number in range(1, rounds) if self.every and number % self.every == 0]

    def learned(self) -> dict[str, Any]:
        """The data of LearnedSpec."""
        return self.model_dump(mode="json", include=set(LearnedSpec.model_fields))


class ServeSpec(Spec):
    """What `python -m flows.serve` leaves to those who start runs of the experiment; other commands do not read it."""

    overrides: list[str] = []
    """Keys that a run of the deployment may set, and groups of which it may choose an option: `[rounds, model,
    algorithm.learning_rate]`. A key stands for itself, not for those below it. Whoever can start a run decides over
    what is listed: a command, a `_target_`, a path or a URL only where that is meant."""

    @field_validator("overrides")
    @classmethod
    def _keys(cls, value: list[str]) -> list[str]:
        for key in value:
            if not _KEY.fullmatch(key):
                raise ValueError(f"keys such as algorithm.learning_rate, or groups such as model; {key!r} is neither")
            if key.partition(".")[0].partition("/")[0] in ("experiment", "hydra", "serve"):
                raise ValueError(f"keys of the experiment; {key!r} is decided by who serves it")
        return value
