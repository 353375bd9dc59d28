"""Stages that a recipe calls, one method each. They label the stages and give them their steps.

Steps: round r is step r, stages before the rounds have step 0, the untrained model before a first training step -1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

from components.algorithms.spec import AlgorithmSpec
from components.artifacts import Artifact
from components.data.spec import DataSpec
from components.errors import Problem, SpecError
from components.rewards.llm.spec import JudgeModel
from flows.execution.overlap import BackgroundRunner, Sequential
from flows.execution.parallel import ParallelRunner, in_turn
from flows.experiment.data_kinds import PREFERENCES, compares_nothing
from flows.experiment.early_stopping import EvaluatedPolicy
from flows.experiment.feedback import FeedbackTraining
from flows.experiment.guards import RunGuards
from flows.experiment.requests import Requests
from flows.experiment.spec import ExperimentSpec
from flows.experiment.starting_point import StartingPoint
from flows.history.records import Notice
from flows.recipes.episodes import FED, Episodes, order_error, training_inputs
from flows.recipes.outcome import RunOutcome
from flows.stages.base import Request, StageRunner
from flows.stages.sample import SampleStage
from flows.stages.validate import ValidateStage

HELDOUT_PROMPTS = 8
"""Number of held-out prompts that the policy answers before and after a training on imported data."""

Item = TypeVar("Item")
T = TypeVar("T")

OnRound = Callable[[int, dict[str, Artifact]], None]
"""Callback after each finished round, with its number and its artifacts by stage."""
OnNotice = Callable[[Notice], None]
"""Callback for notices of guards and for decisions from evaluations."""
Prune = Callable[[EvaluatedPolicy], str | None]
"""Callback for each policy evaluated before the last round. Returns the reason to prune the run, or None."""
Approve = Callable[[RunOutcome, Request], str | None]
"""Callback before the deployment, with the outcome and the request. Returns the reason for a rejection, or None."""


@dataclass(frozen=True)
class PolicyVersion:
    """State of the trained model."""

    checkpoint: Artifact | None = None
    """None: the base model."""
    step: int = 0
    """Round after which it was trained; 0: before the rounds."""


@dataclass
class StageCalls:
    """Stages of one run: what a recipe calls, and what its surroundings contribute."""

    spec: ExperimentSpec
    call: StageRunner
    """Runs one stage: a Prefect task in a run, a lookup in a plan, a plain call in a benchmark."""
    beside: BackgroundRunner | None = None
    """Runs background work; None runs everything sequentially."""
    start: StartingPoint = field(default_factory=StartingPoint)
    on_round: OnRound = lambda number, artifacts: None
    on_notice: OnNotice = lambda notice: None
    prune: Prune = lambda measured: None
    """If it returns a reason, the run ends with the policy that was evaluated last."""
    approve: Approve = lambda outcome, request: None
    outcome: RunOutcome = field(default_factory=RunOutcome)
    """Filled while the stages run, also if a guard ends the run."""
    at_once: ParallelRunner | None = None
    """Runs independent branches; None runs them one after the other."""
    is_branch: bool = False
    """True inside `parallel`."""
    imports: dict[str, Artifact] = field(default_factory=dict)
    """Imported data by the label of its stage."""

    def __post_init__(self) -> None:
        spec = self.spec
        self.requests = Requests(spec)
        self.background = self.beside or Sequential(self.call)
        independent = spec.evaluate.reward is not None or spec.reward_model is not None
        self.guards = RunGuards(spec.guards, self.on_notice, independent)
        fork = self.start.fork
        self.trained_before: list[dict[str, Artifact]] = list(fork.anchored) if fork else []
        """Data of the trainings before the rounds, latest first."""
        self._evaluated: PolicyVersion | None = None

    @property
    def policy(self) -> PolicyVersion:
        """Policy that was trained last; the base model before the first training."""
        return PolicyVersion(self.outcome.checkpoint, self.outcome.step)

    def using(self, **sections: Any) -> Self:
        """Return the stages of this run with other sections of the experiment, such as another `environment`. Labels,
        outcome and guards are shared, so give its stages names of their own."""
        calls = copy.copy(self)
        calls.spec = self.spec.model_copy(update=sections)
        calls.requests = Requests(calls.spec, self.requests.tasks)
        return calls

    def parallel(self, work: Callable[[Self, Item], T], items: Iterable[Item]) -> list[T]:
        """Return `work(run, item)` of each item, in their order. They run at the same time, up to `compute.parallel`,
        so none may depend on another; results and records are the same as one after the other.

        work: collects, judges or filters with the stages `run` that it is given, with names of its own for each item.
        Raises SpecError if it sets the policy of the run (`begin`, `train`, `evaluate`) or plays rounds."""
        run = self.at_once or in_turn(self.call)
        return run([partial(self._branch, work, item) for item in items])

    def _branch(self, work: Callable[[Self, Item], T], item: Item, call: StageRunner) -> T:
        calls = copy.copy(self)
        calls.call, calls.is_branch = call, True
        return work(calls, item)

    def refuse_branch(self) -> None:
        """Raise SpecError inside `parallel`. For calls whose order matters."""
        if self.is_branch:
            raise order_error(
                "begins, trains, evaluates or plays rounds inside run.parallel, but these set the policy of the run; "
                "call them outside, and only collect, judge and filter inside"
            )

    def refuse_overlap(self) -> None:
        """Raise SpecError with `collect.overlap` or `collect.partial`. For recipes that gather rounds with sections of
        their own."""
        self._refuse_partial("chooses the environment of a round when it begins, so no episode can continue in it")
        if overlap := self.spec.collect.overlap:
            text = "chooses the environment of a round when it begins, so it cannot be collected before; expected 0"
            raise SpecError([Problem("collect.overlap", f"{overlap}: flow={self.spec.flow.name} {text}")])

    def refuse_stopped_evaluations(self) -> None:
        """Raise SpecError with `evaluate.stop=decided`. For recipes that compare their evaluations themselves."""
        if self.spec.evaluate.stop == "decided":
            text = "compares all its evaluations on all scenarios; expected never"
            raise SpecError([Problem("evaluate.stop", f"decided: flow={self.spec.flow.name} {text}")])

    def _refuse_partial(self, reason: str) -> None:
        if self.spec.collect.partial is not None:
            raise SpecError([Problem("collect.partial", f"set: flow={self.spec.flow.name} {reason}; expected null")])

    @property
    def warms_up(self) -> bool:
        """True if the run has a supervised warmup; a fork continues after that of its source run."""
        return self.spec.warmup is not None and self.start.fork is None

    def begin(self, *, pretrains: bool = False) -> PolicyVersion:
        """Return the base model, or the policy of the forked run, after its evaluation `start`, which needs an
        environment.

        pretrains: True if a training before the rounds follows, besides a warmup and feedback. The evaluation has the
        step before such a training."""
        fork = self.start.fork
        policy = PolicyVersion(fork.checkpoint, fork.step) if fork else PolicyVersion()
        self._adopt(policy)
        if self.spec.data.is_set and self.warms_up and not self.spec.flow.offline:
            self.import_data()  # before any work, so that unusable rows cost none
        self.preferences()
        for part in self.start.feedback:
            if isinstance(part.source, DataSpec):
                self._answers(part, policy)
        before = pretrains or self.warms_up or bool(self.start.feedback)
        if self.spec.environment is not None:
            self.evaluate(policy, "start", step=policy.step - 1 if before else policy.step)
        return policy

    def evaluate(
        self, policy: PolicyVersion, name: str, step: int | None = None, reference: Artifact | None = None
    ) -> Artifact:
        """Evaluate a policy on held-out scenarios as `evaluate[name]`; the run reports it. reference: evaluation from
        which the difference is decided with `evaluate.stop=decided`; None plays all scenarios, so that later policies
        can be compared with this one on all of them."""
        self._adopt(policy)
        request = self.requests.evaluate(policy.checkpoint, reference=reference)
        evaluation = self.call(f"evaluate[{name}]", policy.step if step is None else step, request)
        self.outcome.evaluations[name] = evaluation
        self._evaluated = policy
        return evaluation

    def demonstrations(self) -> Episodes:
        """Return scored and selected demonstrations by the environment's solver or by the teacher, from `warmup`."""
        episodes = Episodes("sft", 0, self.call("collect[sft]", 0, self.requests.demonstrate()))
        return self.filter(self.judge(episodes), warmup=True)

    def import_data(self) -> Episodes:
        """Return the episodes of the data of `data`, checked, scored and selected, as the stage `import`.

        Raises SpecError if no data is set, or if it cannot be read."""
        if not self.spec.data.is_set:
            raise SpecError([Problem("data.path", "needs a value: data.path=FILE, or data.dataset=NAME")])
        return Episodes.of("import", 0, self._imported("import", "data", self.spec.data))

    def preferences(self) -> Artifact | None:
        """Return the preferences of `reward_model.data` as the stage `import[reward]`; None without any. Raises
        SpecError if they cannot be read, or if none compares two answers."""
        part = self.spec.reward_model
        if part is None or not part.data.is_set:
            return None
        data = self._imported("import[reward]", PREFERENCES, part.data)
        if not part.algorithm.learns_turn_labels and data.metrics.get("comparable") == 0:
            raise SpecError([compares_nothing()])
        return data

    def _imported(self, label: str, section: str, data: DataSpec) -> Artifact:
        """Return data of one's own, imported once in a run."""
        if label not in self.imports:
            self.imports[label] = self.call(label, 0, self.requests.import_data(data, section))
        return self.imports[label]

    def validate(self, data: Episodes, policy: PolicyVersion, name: str, step: int | None = None) -> None:
        """Measure the likelihood of the held-out rows of imported data under a policy as `validate[name]`, and sample
        its answers to their first prompts as `sample[name]`; the run reports both. Does nothing if `data` holds no rows
        out."""
        if not self.spec.data.holds_out:
            return
        step = policy.step if step is None else step
        inputs = {"data": data.trajectories, "policy": policy.checkpoint}
        likelihood = ValidateStage(model=self.spec.model, pack_tokens=self.spec.algorithm.pack_size)
        request = self.requests.request("validate", likelihood, inputs)
        self.outcome.validations[name] = self.call(f"validate[{name}]", step, request)
        answers = SampleStage(
            model=self.spec.model.base(),
            inference=self.requests.inference,
            max_tokens=self.spec.agent.max_tokens,
            prompts=HELDOUT_PROMPTS,
        )
        request = self.requests.request("sample", answers, inputs)
        self.outcome.answers[name] = self.call(f"sample[{name}]", step, request)

    def generate_tasks(self, author: JudgeModel, *, count: int, about: str, difficulties: Sequence[int]) -> Artifact:
        """Return tasks that a model writes for the tools of the environment's MCP server, as the stage `generate`. All
        later stages of the run play these."""
        request = self.requests.generate_tasks(author, count=count, about=about, difficulties=difficulties)
        tasks = self.call("generate", 0, request)
        self.requests.tasks = self.outcome.tasks = tasks
        return tasks

    def collect(self, policy: PolicyVersion, name: str | None = None) -> Episodes:
        """Return episodes of the policy on train scenarios, as `collect[name]`. name: by default the next step."""
        self._refuse_partial("collects episodes outside of its rounds, where none continues")
        number = policy.step + 1
        trajectories = self.call(f"collect[{name or number}]", number, self.requests.collect(policy.checkpoint, number))
        return Episodes(name or str(number), number, trajectories)

    def judge(
        self, episodes: Episodes, policy: PolicyVersion | None = None, reward_models: Sequence[Artifact] = ()
    ) -> Episodes:
        """Return the episodes with their scores. policy: that which produced them, for a reward that queries it."""
        request = self.requests.judge(episodes.trajectories, policy.checkpoint if policy else None, reward_models)
        return replace(episodes, scores=self.call(f"judge[{episodes.name}]", episodes.step, request))

    def filter(self, episodes: Episodes, *, warmup: bool = False) -> Episodes:
        """Return the episodes with the selection that `filter` makes. warmup: select with `warmup.filter`.
        Raises SpecError for episodes without scores."""
        if episodes.scores is None:
            raise order_error(f"filters the episodes {episodes.name} before they are judged; call run.judge first")
        request = self.requests.filter(episodes.trajectories, episodes.scores, warmup=warmup)
        label = f"filter[{episodes.name}]"
        selection = self.call(label, episodes.step, request)
        if warmup:
            self.guards.filtered(label, episodes.step, selection)
        return replace(episodes, selection=selection)

    def train(
        self, data: Sequence[Episodes], name: str, *, algorithm: AlgorithmSpec, start: PolicyVersion
    ) -> PolicyVersion:
        """Return the policy `start` after training on the data, as `train[name]`, outside of the rounds.

        Raises SpecError for data without scores or selection."""
        inputs = training_inputs(data)
        request = self.requests.train_once(inputs, algorithm=algorithm, start=start.checkpoint)
        policy = PolicyVersion(self.call(f"train[{name}]", start.step, request), start.step)
        self._adopt(policy)
        first = {name: inputs[name] for name in FED}
        self.trained_before = [first, *self.trained_before]
        return policy

    def warm_up(self, policy: PolicyVersion, using: Self | None = None) -> tuple[PolicyVersion, list[Episodes]]:
        """Return the policy after the supervised `warmup`, evaluated as `sft`, and what it was trained on: the data of
        `data` if it is set and the recipe is not offline, else demonstrations. Without a warmup return the policy
        itself.

        using: stages with other sections of the experiment, for the demonstrations; by default the run's own."""
        if not self.warms_up:
            return policy, []
        assert self.spec.warmup is not None
        imports = self.spec.data.is_set and not self.spec.flow.offline
        episodes = self.filter(self.import_data(), warmup=True) if imports else (using or self).demonstrations()
        if imports:
            self.validate(episodes, policy, "before", policy.step - 1)
        policy = self.train([episodes], "sft", algorithm=self.spec.warmup.algorithm, start=policy)
        if imports:
            self.validate(episodes, policy, "after")
        self.evaluate(policy, "sft")
        return policy, [episodes]

    def train_on_feedback(self, policy: PolicyVersion) -> PolicyVersion:
        """Return the policy after training on human feedback, first on scores and corrections, then on choices, as far
        as there are some, evaluated as `feedback`. Without `feedback` return the policy itself."""
        for part in self.start.feedback:
            episodes = Episodes.of(part.name, policy.step, self._answers(part, policy))
            policy = self.train([episodes], part.name, algorithm=part.algorithm, start=policy)
        if self.start.feedback:
            self.evaluate(policy, "feedback")
        return policy

    def _answers(self, part: FeedbackTraining, policy: PolicyVersion) -> Artifact:
        """Return the episodes that a training on human feedback learns from."""
        if isinstance(part.source, DataSpec):
            return self._imported(f"import[{part.name}]", "feedback", part.source)
        request = self.requests.request("feedback", part.source, part.artifacts)
        return self.call(f"feedback[{part.name}]", policy.step, request)

    def measure(self, policy: PolicyVersion, label: str) -> Artifact:
        """Evaluate a policy of the rounds. A second evaluation of a policy is cached and adds no measurement."""
        start = self.outcome.measured[0]
        reference = start.evaluation if start.step < policy.step else None
        evaluation = self.call(label, policy.step, self.requests.evaluate(policy.checkpoint, reference=reference))
        if self.outcome.measured[-1].step < policy.step:
            self.outcome.measured.append(EvaluatedPolicy(policy.step, policy.checkpoint, evaluation))
            if self.spec.evaluate.every:
                self.guards.evaluated(self.outcome.measured, self.outcome.training_rewards)
        return evaluation

    def report(self, name: str, value: float | None) -> None:
        """Add a number of the recipe's own to the results of the run: console, result line, MLflow and report. None: it
        is unknown, as in a plan, and is left out."""
        if value is not None:
            self.outcome.reported[name] = value

    def pruned(self) -> bool:
        """Return True if the sweep prunes the run after the last evaluation."""
        self.outcome.pruned = self.prune(self.outcome.measured[-1])
        if self.outcome.pruned is not None:
            self.on_notice(Notice("pruned", self.outcome.step, self.outcome.pruned))
        return self.outcome.pruned is not None

    def _adopt(self, policy: PolicyVersion) -> None:
        """Make the policy that of the outcome."""
        self.refuse_branch()
        self.outcome.checkpoint, self.outcome.step = policy.checkpoint, policy.step
