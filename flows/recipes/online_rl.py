"""Online RL: evaluate, supervised warmup, then rounds of collect, judge, filter and train; evaluate, deploy.

With `collect.overlap`, round r + 1 is collected while round r trains, with the policy of round r - 1.
With `reward_model`, reward models are trained before the rounds and score them; with `reward_model.every` they are
retrained between the rounds: `train[reward@3]`.
The policy may be evaluated between the rounds: `evaluate[3]`. The final evaluation is always `evaluate[final]`.

Steps: round r is step r, stages before the rounds have step 0, the untrained model before a warmup has step -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from components.artifacts import Artifact
from flows.execution.overlap import sequential
from flows.experiment.early_stopping import EvaluatedPolicy, choose, why_stop
from flows.experiment.guards import RunGuards
from flows.experiment.requests import Requests, StageRunner
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Notice
from flows.recipes.outcome import RunOutcome
from flows.recipes.recipe_run import OnNotice, RecipeRun
from flows.recipes.reward_models import RewardModels
from flows.stages.base import Request

FEEDS = ("trajectories", "scores", "selection")
"""Names of the training inputs: the artifacts of collect, judge and filter."""


def online_rl(run: RecipeRun, spec: ExperimentSpec) -> RunOutcome:
    """Run the stages of an experiment in order; of a fork, those after its starting step. Return `run.outcome`.

    An unknown measurement (of a pending artifact in a plan) decides nothing: no guard triggers, the rounds do not end
    early, and the last policy is the final one. Raises GuardTriggered, and the errors of the stages.
    """
    requests = Requests(spec)
    call, on_notice, outcome = run.call, run.on_notice, run.outcome
    begin, feedback = run.start.fork, run.start.feedback
    beside = run.beside or sequential(call)
    independent = spec.evaluate.reward is not None or spec.reward_model is not None
    guards = RunGuards(spec.guards, on_notice, independent)
    if begin is not None:
        outcome.checkpoint, outcome.step = begin.checkpoint, begin.step
    warmup = spec.warmup if begin is None else None
    before = outcome.step - 1 if warmup or feedback is not None else outcome.step
    anchored = begin.anchored if begin else []
    outcome.evaluations["start"] = call("evaluate[start]", before, requests.evaluate(outcome.checkpoint))
    if warmup:
        demonstrations = call("collect[sft]", 0, requests.demonstrate())
        scores = call("judge[sft]", 0, requests.judge(demonstrations))
        selection = call("filter[sft]", 0, requests.filter(demonstrations, scores, warmup=True))
        guards.filtered("filter[sft]", 0, selection)
        anchored = [{"trajectories": demonstrations, "scores": scores, "selection": selection}]
        outcome.checkpoint = call("train[sft]", 0, requests.warm_up(demonstrations, scores, selection))
        outcome.evaluations["sft"] = call("evaluate[sft]", 0, requests.evaluate(outcome.checkpoint))
    if feedback is not None:
        answers = call("feedback", outcome.step, requests.feedback(feedback))
        request = requests.train_feedback(answers, outcome.checkpoint)
        anchored = [dict.fromkeys(FEEDS, answers), *anchored]
        outcome.checkpoint = call("train[feedback]", outcome.step, request)
        outcome.evaluations["feedback"] = call(
            "evaluate[feedback]", outcome.step, requests.evaluate(outcome.checkpoint)
        )
    outcome.measured.append(EvaluatedPolicy(outcome.step, outcome.checkpoint, outcome.last))

    def pruned() -> bool:
        """Return True if the sweep prunes the run after the last evaluation."""
        outcome.pruned = run.prune(outcome.measured[-1])
        if outcome.pruned is not None:
            on_notice(Notice("pruned", outcome.step, outcome.pruned))
        return outcome.pruned is not None

    def evaluate(label: str) -> Artifact:
        """Evaluate the current policy. A second evaluation of a policy is cached and adds no measurement."""
        evaluation = call(label, outcome.step, requests.evaluate(outcome.checkpoint))
        if outcome.measured[-1].step < outcome.step:
            outcome.measured.append(EvaluatedPolicy(outcome.step, outcome.checkpoint, evaluation))
            if spec.evaluate.every:
                guards.evaluated(outcome.measured, outcome.training_rewards)
        return evaluation

    reference = begin.reference if begin and feedback is None else outcome.checkpoint
    earlier = list(begin.earlier) if begin else []
    anchor = outcome.checkpoint
    models = RewardModels(spec, requests, call)
    outcome.reward_models = models.trained
    for step, policy in {0: reference, **(begin.followed if begin else {})}.items():
        models.follow(step, policy)  # a fork gets those of the source run from the cache
    background = None
    rounds = range(outcome.step + 1, spec.rounds + 1)
    for number in rounds if rounds and not pruned() else ():
        gather = partial(_gather, spec, requests, models.in_force)
        gathered = background.value if background else gather(outcome.checkpoint, number, call)
        judged_since = max(outcome.reward_models, default=0)
        guards.gathered(number, gathered.fed["trajectories"], gathered.fed["scores"], judged_since)
        guards.filtered(f"filter[{number}]", number, gathered.largest)
        fed = gathered.fed
        request = requests.train(
            fed,
            number,
            start=outcome.checkpoint,
            reference=reference,
            earlier=earlier,
            anchor=anchor,
            anchored=anchored,
        )
        earlier.insert(0, fed)
        label = f"train[{number}]"
        overlaps = spec.collect.overlap and number < spec.rounds
        work = partial(gather, outcome.checkpoint, number + 1)
        with beside(label, work) if overlaps else nullcontext() as background:
            outcome.checkpoint = call(label, number, request)
        outcome.step = number
        inputs = zip(("collect", "judge", "filter"), (fed[name] for name in FEEDS), strict=True)
        artifacts = {**dict(inputs), "train": outcome.checkpoint}
        outcome.rounds.append(artifacts)
        run.on_round(number, artifacts)
        if spec.evaluate.every and number % spec.evaluate.every == 0 and number < spec.rounds:
            evaluate(f"evaluate[{number}]")
            if spec.early_stopping and (reason := why_stop(outcome.measured, spec.early_stopping)):
                outcome.stopped = reason
                on_notice(Notice("early_stopping", number, reason))
                break
            if pruned():
                break
        models.follow(number, outcome.checkpoint)
    if spec.rounds and spec.deploy.policy == "best" and outcome.pruned is None:
        if outcome.measured[-1].step < outcome.step:
            evaluate(f"evaluate[{outcome.step}]")
        _take_best(spec, outcome, on_notice)
    if spec.rounds:
        outcome.evaluations["final"] = evaluate("evaluate[final]")
    if outcome.checkpoint is not None and spec.deploy.mode != "none" and outcome.pruned is None:
        request = requests.deploy(outcome.checkpoint, outcome.step, outcome.evaluations)
        outcome.rejected = run.approve(outcome, request)
        if outcome.rejected is None:
            outcome.export = call("deploy", outcome.last_step, request)
        else:
            on_notice(Notice("rejected", outcome.last_step, outcome.rejected))
    return outcome


@dataclass(frozen=True)
class _Gathered:
    """Training inputs of a round."""

    fed: dict[str, Artifact]
    """Trajectories, scores and selection; those of refills, after the filter kept too few scenarios, are named
    `trajectories+1` and so on."""
    largest: Artifact
    """Selection that kept the most episodes."""


def _gather(
    spec: ExperimentSpec,
    requests: Requests,
    judges: Sequence[Artifact],
    policy: Artifact | None,
    number: int,
    call: StageRunner,
) -> _Gathered:
    """Collect, judge and filter a round. judges: current reward models."""

    def gather(label: str, request: Request) -> tuple[Artifact, Artifact, Artifact]:
        trajectories = call(f"collect[{label}]", number, request)
        scores = call(f"judge[{label}]", number, requests.judge(trajectories, policy, judges))
        return trajectories, scores, call(f"filter[{label}]", number, requests.filter(trajectories, scores))

    artifacts = gather(str(number), requests.collect(policy, number))
    fed, largest, drawn = dict(zip(FEEDS, artifacts, strict=True)), artifacts[-1], 0
    remaining = artifacts[-1].metrics.get("scenarios")
    for refill in range(1, spec.collect.refills + 1):
        if remaining is None or remaining >= spec.collect.scenarios:
            break
        missing = spec.collect.scenarios - int(remaining)
        request = requests.collect(policy, number, further=(drawn, missing))
        artifacts = gather(f"{number}+{refill}", request)
        fed |= {f"{name}+{refill}": artifact for name, artifact in zip(FEEDS, artifacts, strict=True)}
        drawn += missing
        remaining += artifacts[-1].metrics.get("scenarios", missing)
        largest = max(largest, artifacts[-1], key=lambda selection: selection.metrics.get("kept", 0.0))
    return _Gathered(fed, largest)


def _take_best(spec: ExperimentSpec, outcome: RunOutcome, on_notice: OnNotice) -> None:
    """Make the best evaluated policy the final one."""
    metric = spec.early_stopping.metric if spec.early_stopping else "success"
    best = choose(outcome.measured, metric)
    outcome.checkpoint, outcome.step = best.checkpoint, best.step
    if best.value(metric) is not None and all(policy.exists for policy in outcome.measured):
        point = f"after round {best.step}" if best.step > outcome.first_step else "at the start of the rounds"
        values = [(policy.step, policy.value(metric)) for policy in outcome.measured]
        figures = ", ".join(f"step {step}: {value:.3f}" for step, value in values if value is not None)
        outcome.chosen = f"the final policy is the one {point}, the best by held-out {metric} ({figures})"
        on_notice(Notice("best", best.step, outcome.chosen))
