"""The experiment: one typed spec for everything that a run does, composed from `conf/` by Hydra.

Single fields are checked by their types; what only makes sense together, `flows.experiment.checks` looks at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from components.algorithms.spec import (
    AlgorithmSpec,
    DistillSpec,
    EWCSpec,
    ReplaySpec,
)
from components.artifacts import store_uri
from components.compute.spec import ComputeSpec
from components.deployment.spec import DeploySpec
from components.errors import Problem
from components.evaluation.spec import CalibrateSpec, EvaluateSpec
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import ModelSpec
from components.rewards.llm.spec import EmbeddedJudge, asked_by
from components.rewards.spec import JudgeSpec
from components.rollout.spec import AgentSpec, CollectSpec
from components.specs import Spec, Target
from components.tracking.spec import TrackingSpec
from flows.experiment import checks
from flows.experiment.early_stopping import EarlyStoppingSpec
from flows.experiment.feedback import FeedbackSpec
from flows.experiment.guards import GuardsSpec
from flows.experiment.sections import RewardModelPartSpec, ServeSpec, WarmupSpec
from flows.terminal.arguments import DEFAULT_ROOT, root_folder

CODE = Path(__file__).resolve().parents[2]
"""The folder that holds flows/, components/ and conf/."""


class ExperimentSpec(Spec):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the experiment in MLflow and of the exported model."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Everything random follows from it."""
    root: str = Field(None, validate_default=True)
    """Folder for everything that a run writes: artifacts, MLflow and Prefect data, logs. Absolute once validated; a
    relative one lies below the working directory, none (null) means `runs` beside the code."""
    store: str | None = None
    """URI of a store of artifacts that several machines share, such as `s3://BUCKET/PREFIX`; what is below `root` is
    then a working copy of it. Credentials come from the environment. None means only the folder below `root`."""
    rounds: int = Field(4, ge=0, le=100_000)
    """Rounds of collect, judge, filter, train. 0 without warmup only evaluates, and deploys nothing."""
    fork: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+(@\d+)?$")
    """RUN@STEP: begins with the policy that another run below the same root had after round STEP (0: after its warmup),
    in place of a warmup and the rounds up to there; without @STEP with its last. `rounds` counts from the start of
    that run."""
    early_stopping: EarlyStoppingSpec | None = None
    """`{patience: K, metric: success or reward, min_gain: 0.0}`: the rounds end when the held-out metric has not risen
    by more than `min_gain` above the best so far in the last K evaluations. Needs `evaluate.every`. None plays all."""
    guards: GuardsSpec = GuardsSpec()
    model: ModelSpec
    environment: Target
    """Class that implements the environment protocol."""
    reward: Target
    """Function `(trajectory) -> float`, or class that is callable so or has `score_group`."""
    filter: Target
    """Class with `select(group)`: which episodes are trained on."""
    algorithm: AlgorithmSpec
    warmup: WarmupSpec | None = None
    """None starts the rounds from the model as it is."""
    replay: ReplaySpec | None = None
    """`{share: 0.25, rounds: 2, max_staleness: null}`: groups of earlier rounds that each training learns from too.
    None trains each round on its own episodes."""
    ewc: EWCSpec | None = None
    """`{coefficient: 1.0, trajectories: 64, rounds: 1}`: elastic weight consolidation, which holds what the policy knew
    when the rounds began: what the warmup taught it, or the run that is forked. None holds nothing."""
    feedback: FeedbackSpec | None = None
    """Training on what people said of episodes, after the warmup or the policy that is forked; None asks nobody."""
    reward_model: RewardModelPartSpec | None = None
    """None judges the rounds by the declared reward."""
    agent: AgentSpec = AgentSpec()
    inference: InferenceSpec = EmbeddedSpec()
    """Engine of the episodes of a policy."""
    collect: CollectSpec = CollectSpec()
    judge: JudgeSpec = JudgeSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    calibrate: CalibrateSpec = CalibrateSpec()
    deploy: DeploySpec = DeploySpec()
    compute: ComputeSpec = ComputeSpec()
    tracking: TrackingSpec = TrackingSpec()
    serve: ServeSpec = ServeSpec()
    allow: list[str] = []
    """Packages of your own from which a `_target_` may come, besides `components`."""

    @field_validator("root", mode="before")
    @classmethod
    def _absolute(cls, value: Any) -> Any:
        if value is None:
            return str(DEFAULT_ROOT)
        return str(root_folder(value)) if isinstance(value, str) else value

    @field_validator("allow")
    @classmethod
    def _there(cls, value: list[str]) -> list[str]:
        for package in value:
            if not all(part.isidentifier() for part in package.split(".")):
                raise ValueError(f"names of packages; {package!r} is none")
            if package.partition(".")[0] in sys.stdlib_module_names:
                raise ValueError(
                    f"packages of your own; {package!r} is of Python's standard library, with which a configuration "
                    "could run any program. Wrap what you need in a function of your own package, and allow that"
                )
            if find_spec(package.partition(".")[0]) is None:
                raise ValueError(
                    f"packages that can be imported; {package!r} is not found: is its folder in PYTHONPATH?"
                )
        return value

    @field_validator("store")
    @classmethod
    def _shared(cls, value: str | None) -> str | None:
        return None if value is None else store_uri(value)

    def teachers(self) -> list[ModelSpec]:
        """The models that are learned from, beside the one in training."""
        found = [self.algorithm.teacher] if isinstance(self.algorithm, DistillSpec) and self.rounds else []
        if self.warmup is not None and self.warmup.teacher is not None and self.warmup.teacher.model is not None:
            found.append(self.warmup.teacher.model)
        if self.collect.teacher is not None and self.collect.teacher.model is not None and self.rounds:
            found.append(self.collect.teacher.model)
        return [one.model(self.model.max_length) for one in found]

    def judges(self) -> list[ModelSpec]:
        """The models on this machine that are asked for judgements."""
        found = [one for one in asked_by(self.reward) if isinstance(one, EmbeddedJudge)]
        return [one.model.model(one.context) for one in found]

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        return checks.problems(parts)
