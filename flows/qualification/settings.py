"""Settings of an experiment that a qualification reads."""

from __future__ import annotations

from typing import Protocol

from components.evaluation.spec import EvaluateSpec
from components.models.spec import ModelSpec
from components.rollout.spec import AgentSpec
from components.specs import Target


class QualifiedSettings(Protocol):
    """Sections of an experiment: environment, reward, agent, model and evaluation."""

    @property
    def required_environment(self) -> Target: ...

    @property
    def reward(self) -> Target: ...

    @property
    def agent(self) -> AgentSpec: ...

    @property
    def model(self) -> ModelSpec: ...

    @property
    def evaluate(self) -> EvaluateSpec: ...
