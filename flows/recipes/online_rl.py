"""Online RL: evaluate, warm up by supervised training, then rounds of collect, judge, filter, train; evaluate, deploy.
With `collect.overlap`, round r + 1 is collected while round r is trained, by the policy that has been through r - 1.
With `reward_model`, models of the reward are trained before the rounds, and judge in them; with `reward_model.every`
they are trained further between the rounds: `train[reward@3]`.
Between the rounds the policy may be evaluated too: `evaluate[3]`; the final one is always `evaluate[final]`.

`online_rl` is the order of the stages, written against a function that runs one (`Call`): Prefect's tasks in a run,
plain calls in a benchmark; and against one that does work beside a stage (`Beside`).

Steps: round r is step r, what comes before the rounds is step 0, the untrained model before a warmup is step -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from components.artifacts import Artifact
from flows.execution.overlap import Beside, one_by_one
from flows.experiment.early_stopping import Measured, choose, why_stop
from flows.experiment.feedback import Said
from flows.experiment.fork import Fork
from flows.experiment.guards import Guards
from flows.experiment.requests import Call, Requests
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Notice
from flows.recipes.outcome import Approve, OnNotice, OnRound, Outcome, Prune
from flows.recipes.reward_models import RewardModels
from flows.stages.base import Request

FEEDS = ("trajectories", "scores", "selection")
"""What collect, judge and filter leave for training."""


def online_rl(
    spec: ExperimentSpec,
    call: Call,
    on_round: OnRound | None = None,
    begin: Fork | None = None,
    on_notice: OnNotice = lambda notice: None,
    beside: Beside | None = None,
    said: Said | None = None,
    outcome: Outcome | None = None,
    prune: Prune = lambda measured: None,
    approve: Approve = lambda outcome, request: None,
) -> Outcome:
    """The stages of an experiment, in order; of a fork, those after the step where it begins. beside: None does all
    one after the other. said: what people said, where the experiment has `feedback`. outcome: is filled as the stages
    end, for who wants it where a guard ends the run. prune: where it says so, the run ends with the policy that was
    evaluated last. approve: asked before the policy is deployed.

    What depends on a measurement that is not known (of an artifact that a plan has not made) goes on as if nothing had
    been found: no guard strikes, the rounds do not end early, the last policy is the final one. Raises GuardStruck, and
    whatever `call` raises.
    """
    requests = Requests(spec)
    beside = beside or one_by_one(call)
    independent = spec.evaluate.reward is not None or spec.reward_model is not None
    guards = Guards(spec.guards, on_notice, independent)
    outcome = outcome or Outcome()
    if begin is not None:
        outcome.checkpoint, outcome.step = begin.checkpoint, begin.step
    warmup = spec.warmup if begin is None else None
    before = outcome.step - 1 if warmup or said is not None else outcome.step
    anchored = begin.anchored if begin else []
    outcome.evaluations["start"] = call("evaluate[start]", before, requests.evaluate(outcome.checkpoint))
    if warmup:
        shown = call("collect[sft]", 0, requests.demonstrate())
        scores = call("judge[sft]", 0, requests.judge(shown))
        kept = call("filter[sft]", 0, requests.filter(shown, scores, warmup=True))
        guards.filtered("filter[sft]", 0, kept)
        anchored = [{"trajectories": shown, "scores": scores, "selection": kept}]
        outcome.checkpoint = call("train[sft]", 0, requests.warm_up(shown, scores, kept))
        outcome.evaluations["sft"] = call("evaluate[sft]", 0, requests.evaluate(outcome.checkpoint))
    if said is not None:
        told = call("feedback", outcome.step, requests.feedback(said))
        request = requests.train_feedback(told, outcome.checkpoint)
        anchored = [dict.fromkeys(FEEDS, told), *anchored]
        outcome.checkpoint = call("train[feedback]", outcome.step, request)
        outcome.evaluations["feedback"] = call(
            "evaluate[feedback]", outcome.step, requests.evaluate(outcome.checkpoint)
        )
    outcome.measured.append(Measured(outcome.step, outcome.checkpoint, outcome.last))

    def hopeless() -> bool:
        """Whether the sweep ends the run with the policy as it stands."""
        outcome.pruned = prune(outcome.measured[-1])
        if outcome.pruned is not None:
            on_notice(Notice("pruned", outcome.step, outcome.pruned))
        return outcome.pruned is not None

    def evaluate(label: str) -> Artifact:
        """Evaluates the policy as it stands. One that was evaluated already is found, and is no second measurement."""
        found = call(label, outcome.step, requests.evaluate(outcome.checkpoint))
        if outcome.measured[-1].step < outcome.step:
            outcome.measured.append(Measured(outcome.step, outcome.checkpoint, found))
            if spec.evaluate.every:
                guards.evaluated(outcome.measured, outcome.training_rewards)
        return found

    reference = begin.reference if begin and said is None else outcome.checkpoint
    earlier = list(begin.earlier) if begin else []
    anchor = outcome.checkpoint
    models = RewardModels(spec, requests, call)
    outcome.reward_models = models.trained
    for step, policy in {0: reference, **(begin.followed if begin else {})}.items():
        models.follow(step, policy)  # a fork finds those of the other run
    ahead = None
    rounds = range(outcome.step + 1, spec.rounds + 1)
    for number in rounds if rounds and not hopeless() else ():
        gather = partial(_gather, spec, requests, models.in_force)
        gathered = ahead.found if ahead else gather(outcome.checkpoint, number, call)
        judged_since = max(outcome.reward_models, default=0)
        guards.gathered(number, gathered.fed["trajectories"], gathered.fed["scores"], judged_since)
        guards.filtered(f"filter[{number}]", number, gathered.fullest)
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
        with beside(label, work) if overlaps else nullcontext() as ahead:
            outcome.checkpoint = call(label, number, request)
        outcome.step = number
        made = zip(("collect", "judge", "filter"), (fed[name] for name in FEEDS), strict=True)
        artifacts = {**dict(made), "train": outcome.checkpoint}
        outcome.rounds.append(artifacts)
        if on_round is not None:
            on_round(number, artifacts)
        if spec.evaluate.every and number % spec.evaluate.every == 0 and number < spec.rounds:
            evaluate(f"evaluate[{number}]")
            if spec.early_stopping and (reason := why_stop(outcome.measured, spec.early_stopping)):
                outcome.stopped = reason
                on_notice(Notice("early_stopping", number, reason))
                break
            if hopeless():
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
        outcome.rejected = approve(outcome, request)
        if outcome.rejected is None:
            outcome.export = call("deploy", outcome.last_step, request)
        else:
            on_notice(Notice("rejected", outcome.last_step, outcome.rejected))
    return outcome


@dataclass(frozen=True)
class _Gathered:
    """What a round is trained on."""

    fed: dict[str, Artifact]
    """Trajectories, scores and selection; those of further collections, where the filter left too few scenarios, as
    `trajectories+1` and so on."""
    fullest: Artifact
    """The selection that kept the most."""


def _gather(
    spec: ExperimentSpec,
    requests: Requests,
    judges: Sequence[Artifact],
    policy: Artifact | None,
    number: int,
    call: Call,
) -> _Gathered:
    """Collects, judges and filters a round. judges: the reward models in force."""

    def gather(label: str, request: Request) -> tuple[Artifact, Artifact, Artifact]:
        played = call(f"collect[{label}]", number, request)
        scores = call(f"judge[{label}]", number, requests.judge(played, policy, judges))
        return played, scores, call(f"filter[{label}]", number, requests.filter(played, scores))

    made = gather(str(number), requests.collect(policy, number))
    fed, fullest, drawn = dict(zip(FEEDS, made, strict=True)), made[-1], 0
    left = made[-1].metrics.get("scenarios")
    for again in range(1, spec.collect.refills + 1):
        if left is None or left >= spec.collect.scenarios:
            break
        lacking = spec.collect.scenarios - int(left)
        request = requests.collect(policy, number, further=(drawn, lacking))
        made = gather(f"{number}+{again}", request)
        fed |= {f"{name}+{again}": artifact for name, artifact in zip(FEEDS, made, strict=True)}
        drawn += lacking
        left += made[-1].metrics.get("scenarios", lacking)
        fullest = max(fullest, made[-1], key=lambda one: one.metrics.get("kept", 0.0))
    return _Gathered(fed, fullest)


def _take_best(spec: ExperimentSpec, outcome: Outcome, on_notice: OnNotice) -> None:
    """Makes the best of the measured policies the final one."""
    metric = spec.early_stopping.metric if spec.early_stopping else "success"
    best = choose(outcome.measured, metric)
    outcome.checkpoint, outcome.step = best.checkpoint, best.step
    if best.value(metric) is not None and all(one.made for one in outcome.measured):
        where = f"after round {best.step}" if best.step > outcome.first_step else "at the start of the rounds"
        values = [(one.step, one.value(metric)) for one in outcome.measured]
        figures = ", ".join(f"step {step}: {found:.3f}" for step, found in values if found is not None)
        outcome.chosen = f"the final policy is the one {where}, the best by held-out {metric} ({figures})"
        on_notice(Notice("best", best.step, outcome.chosen))
