"""Typed spec of an experiment, which Hydra composes from `conf/`.

Types validate single fields; `flows.experiment.checks` validates fields against each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from components.algorithms.choices import AnyAlgorithmSpec
from components.algorithms.continual.spec import EWCSpec, ReplaySpec
from components.artifacts import store_uri
from components.compute.spec import ComputeSpec
from components.data.spec import HELDOUT_SHARE, DataSpec
from components.deployment.spec import DeploySpec
from components.errors import Problem, SpecError
from components.evaluation.spec import CalibrateSpec, EvaluateSpec
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models import precision
from components.models.spec import ModelSpec
from components.models.weights import CACHE
from components.rewards.llm.spec import asked_by
from components.rewards.spec import JudgeSpec
from components.rollout.collect_spec import CollectSpec
from components.rollout.spec import AgentSpec
from components.specs import Spec, Target, marks
from components.tracking.spec import TrackingSpec
from flows.experiment import checks
from flows.experiment.early_stopping import EarlyStoppingSpec
from flows.experiment.feedback import FeedbackSpec
from flows.experiment.flow import DEFAULT_FLOW, FlowTarget
from flows.experiment.guards import GuardsSpec
from flows.experiment.sections import BudgetSpec, NotifySpec, RewardModelPartSpec, ServeSpec, WarmupSpec
from flows.terminal.arguments import DEFAULT_ROOT, root_folder

_NOT_EXPORTED = {"certify", "early_stopping", "guards", "seeds", "store", "calibrate", "serve"}
"""Keys that the description of an export leaves out: what ended the rounds, and the place."""
_AFTER_EXPORT = {"approve", "approve_timeout", "margin", "target", "canary"}
"""Keys of `deploy` about what follows the export."""

Part = TypeVar("Part")


class ExperimentSpec(Spec):
    """All settings of a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the experiment in MLflow and of the exported model."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of all random number generators of the run."""
    seeds: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(None, min_length=1)
    """Seeds of a sweep: one run for each, and means over them. It takes the place of `seed`. null: one run."""
    root: Annotated[str, marks.FILES] = Field(None, validate_default=True)
    """Folder for everything that a run writes: artifacts, MLflow and Prefect data, logs. Validation makes it absolute:
    a relative path is relative to the working directory; null means `runs` beside the code."""
    store: Annotated[str | None, marks.FILES] = None
    """URI of an artifact store that several machines share, such as `s3://BUCKET/PREFIX`; the artifacts below `root`
    are then a working copy. Credentials come from the environment. null: artifacts exist below `root` only."""
    flow: FlowTarget = Field(default_factory=lambda: FlowTarget.model_validate({"_target_": DEFAULT_FLOW}))
    """Recipe that the run executes. Keys below it are the recipe's own."""
    certify: bool = False
    """true: the run begins with the stage `certify`, which checks that chat template, engine, trainer and export agree,
    and ends the run if they do not. Its result is cached for the model, the engine and the sampling settings."""
    rounds: int = Field(0, ge=0, le=100_000)
    """Rounds of collect, judge, filter, train. 0 without warmup only evaluates, and deploys nothing."""
    fork: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+(@\d+)?$")
    """RUN@STEP: start from the policy of another run below the same root after its round STEP (0: after its warmup), in
    place of a warmup and the rounds up to STEP. Without @STEP: from that run's last policy. `rounds` counts from the
    start of that run."""
    early_stopping: EarlyStoppingSpec | None = None
    """`{patience: K, metric: success or reward, min_gain: 0.0}`: the rounds end when, in the last K evaluations, the
    held-out metric has not risen by more than `min_gain` above the best value before them. Needs `evaluate.every`.
    null: all rounds run."""
    guards: GuardsSpec = GuardsSpec()
    notify: NotifySpec = NotifySpec()
    budget: BudgetSpec = BudgetSpec()
    """`{cost: 20, hours: 6}`: maximum cost and time of the stages of a run."""
    model: ModelSpec
    environment: Target | None
    """Class that implements the environment protocol. null: flow=offline trains without one, and its result is the loss
    of held-out rows of the data."""
    reward: Target
    """Function `(trajectory) -> float`, or class with this call signature or with a method `score_group`."""
    filter: Target
    """Class with a method `select(group)` that chooses the episodes to train on."""
    algorithm: AnyAlgorithmSpec
    warmup: WarmupSpec | None = None
    """Supervised training before the rounds; null: the rounds start from the base model."""
    replay: ReplaySpec | None = None
    """`{share: 0.25, rounds: 2, max_staleness: null}`: groups of earlier rounds that each round also trains on. null:
    each round trains on its own episodes only."""
    ewc: EWCSpec | None = None
    """`{coefficient: 1.0, trajectories: 64, rounds: 1}`: elastic weight consolidation, which preserves what the policy
    learned before the rounds, in the warmup or in the forked run. null: none."""
    data: DataSpec = DataSpec()
    """Data of one's own to train on. Flows that import data read it."""
    feedback: FeedbackSpec | None = None
    """Training on human feedback about episodes, after the warmup or from the forked policy. null: none."""
    reward_model: RewardModelPartSpec | None = None
    """Reward model that scores the rounds. null: the declared reward scores them."""
    agent: AgentSpec = AgentSpec()
    inference: InferenceSpec = EmbeddedSpec()
    """Inference engine of the policy's episodes."""
    collect: CollectSpec = CollectSpec()
    judge: JudgeSpec = JudgeSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    calibrate: CalibrateSpec = CalibrateSpec()
    deploy: DeploySpec = DeploySpec()
    compute: ComputeSpec = ComputeSpec()
    tracking: TrackingSpec = TrackingSpec()
    serve: ServeSpec = ServeSpec()
    allow: Annotated[list[str], marks.CODE] = []
    """Packages of the user from which a `_target_` may come, besides `components`."""

    @field_validator("root", mode="before")
    @classmethod
    def _absolute(cls, value: Any) -> Any:
        if value is None:
            return str(DEFAULT_ROOT)
        return str(root_folder(value)) if isinstance(value, str) else value

    @field_validator("allow")
    @classmethod
    def _importable(cls, value: list[str]) -> list[str]:
        for package in value:
            if not all(part.isidentifier() for part in package.split(".")):
                raise ValueError(f"names of packages; {package!r} is not a package name")
            if package.partition(".")[0] in sys.stdlib_module_names:
                raise ValueError(
                    f"packages of your own; {package!r} is in Python's standard library, with which a configuration "
                    "could run any program. Wrap the function that you need in your own package, and allow that package"
                )
            if find_spec(package.partition(".")[0]) is None:
                raise ValueError(
                    f"packages that can be imported; {package!r} cannot be imported. Check that its folder is in "
                    "PYTHONPATH"
                )
        return value

    @field_validator("store")
    @classmethod
    def _shared(cls, value: str | None) -> str | None:
        return None if value is None else store_uri(value)

    @model_validator(mode="after")
    def _held_out(self) -> Self:
        if self.environment is None and self.data.is_set and self.data.heldout is None and not self.data.holds_out:
            self.__dict__["data"] = self.data.model_copy(update={"heldout": HELDOUT_SHARE})
        return self

    @property
    def required_environment(self) -> Target:
        """Environment of a flow or command that plays episodes. Raises SpecError if it is null."""
        if self.environment is None:
            raise SpecError([Problem("environment", "null: expected an environment to play, such as environment=NAME")])
        return self.environment

    def teachers(self) -> list[ModelSpec]:
        """Return the local teacher models of the algorithm, the warmup and the rounds."""
        teacher = self.algorithm.teacher_model
        teachers = [teacher] if teacher is not None and self.rounds else []
        if self.warmup is not None and self.warmup.teacher is not None and self.warmup.teacher.model is not None:
            teachers.append(self.warmup.teacher.model)
        if self.collect.teacher is not None and self.collect.teacher.model is not None and self.rounds:
            teachers.append(self.collect.teacher.model)
        return [teacher.model(self.model.max_length) for teacher in teachers]

    def judges(self) -> list[ModelSpec]:
        """Return the local LLM judge models of the reward."""
        return [judge.local_model for judge in asked_by(self.reward) if judge.local_model is not None]

    def resolve_dtypes(self, part: Part, stage: str) -> Part:
        """Return a part of the experiment with the dtype of each model at the place of a stage in place of `auto`."""
        hardware, short = self.compute.place(stage).hardware, self.inference.short_adapters
        return precision.resolve(part, hardware, Path(self.root) / CACHE, short_adapters=short)

    def corrected_algorithm(self) -> AnyAlgorithmSpec:
        """Return the algorithm of the rounds. `algorithm.correction: auto` becomes `truncate` if the log-probabilities
        of sampled tokens differ from those that the trainer computes, else `none`."""
        return self.algorithm.resolve_correction(self._mismatch(), replay=self.replay is not None)

    def truncation_reason(self) -> str | None:
        """Return the reason why `auto` becomes `truncate`; None if it does not."""
        return self.algorithm.truncation_reason(self._mismatch(), replay=self.replay is not None)

    def _mismatch(self) -> str | None:
        """Return the reason why log-probabilities of sampled tokens differ from the trainer's; None if they agree.

        The embedded engine uses the trainer's weights. In float32 the two agree up to rounding; in half precision they
        do not, because sampling and training sum in different orders.
        """
        if not self.inference.in_process:
            return f"inference={self.inference.name} has its own implementation of the model"
        sampled, trained = (self.resolve_dtypes(self.model, stage).dtype for stage in ("collect", "train"))
        if sampled != trained:
            return f"model.dtype=auto is {sampled} where collect runs and {trained} where train runs"
        if trained != "float32":
            return f"the engine and the trainer round differently in model.dtype={trained}"
        if self.model.quantization != "none":
            return f"the engine and the trainer round differently with model.quantization={self.model.quantization}"
        return self.collect.off_policy_reason(self.rounds)

    def exported(self) -> dict[str, Any]:
        """Return the composed config for the model card, as JSON data.

        The export depends on the policy, which is an input of its stage. It does not depend on the rules that ended the
        rounds, on the place, or on the deployment of the export, so those keys are left out, and with them of the stage
        key."""
        config = self.model_dump(
            mode="json", by_alias=True, exclude={**dict.fromkeys(_NOT_EXPORTED, True), "deploy": _AFTER_EXPORT}
        )
        if self.collect.partial is None:
            del config["collect"]["partial"]
        config["algorithm"]["pack_tokens"] = self.algorithm.pack_size
        config["evaluate"] = EvaluateSpec.declared(config["evaluate"])
        del config["evaluate"]["every"]
        if self.evaluate.samples == 1:
            del config["evaluate"]["samples"]
        del config["data"]
        if self.data.is_set:
            config["data"] = self.data.meaning()  # its content is that of the policy
        if self.reward_model is not None:
            del config["reward_model"]["data"]
            if self.reward_model.data.is_set:
                config["reward_model"]["data"] = self.reward_model.data.meaning()
        del config["judge"]["ahead"]
        return config

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        return checks.problems(parts)
