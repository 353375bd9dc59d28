"""Run of a recipe: the stages that a recipe calls, and what all flows share.

A recipe gets a `Run`. Its methods run one stage each and return its result: `demonstrations`, `collect`, `judge`,
`filter`, `train`, `evaluate` (`flows.recipes.stage_calls`). `rounds` yields the rounds of the experiment and does what
belongs to a round: evaluation between the rounds, early stopping, pruning by a sweep, guards, retraining of reward
models. `execute` runs the recipe, evaluates the policy that it returns, and deploys it.

Labels, steps, records, plan, Prefect tasks, MLflow, lineage and report follow from these calls for every recipe.

An unknown measurement (of a pending artifact in a plan) decides nothing: no guard triggers, the rounds do not end
early, and the last policy is the final one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flows.experiment.early_stopping import choose, measured_metric
from flows.history.records import Notice
from flows.recipes.episodes import order_error
from flows.recipes.outcome import RunOutcome
from flows.recipes.reward_models import RewardModels
from flows.recipes.rounds import Round, RoundLoop
from flows.recipes.stage_calls import PolicyVersion, StageCalls


@dataclass
class Run(StageCalls):
    """Run of a recipe: runs its stages, receives its events, takes the decisions that are not the recipe's, and holds
    its outcome."""

    def execute(self) -> RunOutcome:
        """Certify model and engine if asked to, run the recipe, evaluate the policy that it returns if there is an
        environment, and deploy it. Return the outcome.

        Raises SpecError for a recipe that returns no policy, or calls stages in an impossible order; GuardTriggered;
        the errors of the stages, CertificateFailed among them."""
        if self.spec.certify:
            self.call("certify", self.policy.step - 1, self.requests.certify())
        try:
            policy = self.spec.flow.build()(self, self.spec)
        finally:
            self.background.close()
        if not isinstance(policy, PolicyVersion):
            name = self.spec.flow.name
            raise order_error(f"{name} returned {type(policy).__name__}; expected the trained policy: return policy")
        self._adopt(policy)
        fork = self.start.fork
        has_rounds = self.spec.rounds > (fork.step if fork else 0)  # a fork with feedback may have none left
        if has_rounds and self.spec.deploy.policy == "best" and self.outcome.pruned is None:
            if self.outcome.measured[-1].step < self.outcome.step:
                self.measure(policy, f"evaluate[{policy.step}]")
            policy = self._best()
        evaluated = self._evaluated == policy
        if has_rounds and not (evaluated and "final" in self.outcome.evaluations):
            self.outcome.evaluations["final"] = self.measure(policy, "evaluate[final]")
        elif not has_rounds and not evaluated and self.spec.environment is not None:
            self.evaluate(policy, "final", reference=self.outcome.last if self.outcome.evaluations else None)
        self._report_costs()
        self._report_preference()
        self._deploy(policy)
        return self.outcome

    def rounds(self, policy: PolicyVersion, reward_models: RewardModels | None = None) -> Iterator[Round]:
        """Yield the rounds that begin with this policy; a recipe calls `train` of each once.

        reward_models: models that score the rounds, retrained between them."""
        self.refuse_branch()
        return RoundLoop(self, policy, reward_models).play()

    def _best(self) -> PolicyVersion:
        """Return the best evaluated policy of the rounds."""
        outcome = self.outcome
        metric = self.spec.early_stopping.metric if self.spec.early_stopping else "success"
        metric = measured_metric(outcome.measured, metric)
        best = choose(outcome.measured, metric)
        policy = PolicyVersion(best.checkpoint, best.step)
        self._adopt(policy)
        if best.value(metric) is not None and all(measured.exists for measured in outcome.measured):
            point = f"after round {best.step}" if best.step > outcome.first_step else "at the start of the rounds"
            values = [(measured.step, measured.value(metric)) for measured in outcome.measured]
            figures = ", ".join(f"step {step}: {value:.3f}" for step, value in values if value is not None)
            outcome.chosen = f"the final policy is the one {point}, the best by held-out {metric} ({figures})"
            self.on_notice(Notice("best", best.step, outcome.chosen))
        return policy

    def _report_costs(self) -> None:
        """Report the mean of each cost that the algorithm limits, in the held-out episodes of the final policy, and
        if it is within its limit (1 or 0)."""
        for name, cost in self.spec.algorithm.constraints.items():
            metrics = self.outcome.last.metrics
            mean = metrics.get(name, metrics.get(f"components/{name}"))
            self.report(f"held-out {name}", mean)
            self.report(f"held-out {name} within its limit", None if mean is None else float(mean <= cost.limit))

    def _report_preference(self) -> None:
        """Report the mean score that the last reward models give to the held-out answers of each evaluation, if they
        learned from preferences: then no declared reward measures what the rounds train."""
        models = self.outcome.reward_models
        if self.spec.reward_model is None or not self.spec.reward_model.data.is_set or not models:
            return
        for name, evaluation in self.outcome.evaluations.items():
            request = self.requests.judge(evaluation, reward_models=models[max(models)])
            scores = self.call(f"judge[heldout {name}]", self.outcome.step, request)
            self.report(f"held-out reward-model score, {name}", scores.metrics.get("reward"))

    def _deploy(self, policy: PolicyVersion) -> None:
        """Export the policy, if the experiment deploys and a person who must approve does."""
        outcome = self.outcome
        if policy.checkpoint is None or self.spec.deploy.mode == "none" or outcome.pruned is not None:
            return
        heldout = {f"validation_{name}": artifact for name, artifact in outcome.validations.items()}
        heldout |= {f"answers_{name}": artifact for name, artifact in outcome.answers.items()}
        request = self.requests.deploy(policy.checkpoint, policy.step, outcome.evaluations, heldout)
        outcome.rejected = self.approve(outcome, request)
        if outcome.rejected is None:
            outcome.export = self.call("deploy", outcome.last_step, request)
        else:
            self.on_notice(Notice("rejected", outcome.last_step, outcome.rejected))
