"""Online RL: evaluate, warm up by supervised training, then rounds of collect, judge, filter, train; evaluate, deploy.
With `collect.overlap`, round r + 1 is collected while round r is trained, by the policy that has been through r - 1.
With `reward_model`, models of the reward are trained before the rounds, and judge in them; with `reward_model.every`
they are trained further between the rounds: `train[reward@3]`.
Between the rounds the policy may be evaluated too: `evaluate[3]`; the final one is always `evaluate[final]`.

`online_rl` is the order of the stages, written against a function that runs one (`Call`): Prefect's tasks in a run,
plain calls in a benchmark; and against one that does work beside a stage (`Beside`). `run` is the command's part:
server, tracking, console, signals, results.

Steps: round r is step r, what comes before the rounds is step 0, the untrained model before a warmup is step -1.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from components.artifacts import Artifact
from components.artifacts.roots import private_root
from components.errors import GuardStruck, ResourceError
from components.redaction import refuse_secrets
from flows import approval, feedback, fork, release
from flows.approval import Approve
from flows.feedback import Said
from flows.fork import Fork
from flows.guards import Guards
from flows.keys import check_keys
from flows.overlap import Beside, one_by_one
from flows.overrides import mask_overrides
from flows.records import Notice, Records, recording
from flows.requests import Call, Requests
from flows.reward_models import RewardModels
from flows.spec import CODE, ExperimentSpec
from flows.stages.base import Context, Request
from flows.stopping import Measured, choose, why_stop

logger = logging.getLogger(__name__)

FEEDS = ("trajectories", "scores", "selection")
"""What collect, judge and filter leave for training."""


OnRound = Callable[[int, dict[str, Artifact]], None]
"""Told of each finished round: its number and its artifacts by stage."""
OnNotice = Callable[[Notice], None]
"""Told what guards find, and what is decided from evaluations."""
Prune = Callable[[Measured], str | None]
"""Told of each policy that is evaluated before the last round; answers why the run ends there, or None."""


@dataclass
class Outcome:
    """The artifacts of a run."""

    evaluations: dict[str, Artifact] = field(default_factory=dict)
    """`start`, `sft`, `feedback`, `final`: those that there are, in this order."""
    measured: list[Measured] = field(default_factory=list)
    """Every policy that was evaluated from the start of the rounds on, in order of training."""
    reward_models: dict[int, list[Artifact]] = field(default_factory=dict)
    """By the round after which they were trained (0: before the rounds), and from which on they judged; empty where the
    declared reward does."""
    rounds: list[dict[str, Artifact]] = field(default_factory=list)
    """Of each round: trajectories, scores, selection, checkpoint, by stage."""
    checkpoint: Artifact | None = None
    """The final policy; None where nothing was trained."""
    step: int = 0
    """The round after which the final policy stood; 0: the start of the rounds."""
    stopped: str | None = None
    """Why the rounds ended before their number."""
    pruned: str | None = None
    """Why the sweep that the run belongs to ended it before its time; nothing is deployed then."""
    chosen: str | None = None
    """Why this is the final policy, where the best was asked for."""
    rejected: str | None = None
    """Why it was not deployed, where a person said so."""
    export: Artifact | None = None

    @property
    def last(self) -> Artifact:
        """The evaluation of the final policy."""
        return list(self.evaluations.values())[-1]

    @property
    def decisions(self) -> list[str]:
        """What was decided from evaluations, in words."""
        texts = (self.stopped, self.pruned, self.chosen, self.rejected)
        return [text for text in texts if text is not None]

    @property
    def first_step(self) -> int:
        """Where the rounds began."""
        return self.measured[0].step

    @property
    def last_step(self) -> int:
        """The last round that was played."""
        return self.first_step + len(self.rounds)

    @property
    def training_rewards(self) -> dict[int, float | None]:
        """Mean reward of the episodes of each round; None where it is not known yet. Only of rounds that the judges of
        the last one judged: what others say is no measure for it."""
        judged_since = max(self.reward_models, default=0)
        numbered = enumerate(self.rounds, self.first_step + 1)
        return {n: one["judge"].metrics.get("reward") for n, one in numbered if n > judged_since}


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


def _writable(root: Path) -> None:
    """Raises ResourceError where nothing can be written below the root."""
    try:
        private_root(root)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise ResourceError(
            f"root: cannot write below {root}: {error.strerror or error}. Choose another folder: root=DIR"
        ) from None


def run(
    spec: ExperimentSpec,
    *,
    overrides: Sequence[str] = (),
    sweep: str | None = None,
    prune: Prune = lambda measured: None,
) -> dict[str, Any]:
    """Runs the experiment as a Prefect flow and prints its result: a table on stderr, one JSON object as the last line
    on stdout, which is returned.

    sweep: id of the sweep that this run belongs to; its MLflow run becomes a child of the sweep's. prune: see
    `online_rl`. Raises SpecError, ResourceError, whatever a stage raises, and KeyboardInterrupt where a signal stopped
    it.
    """
    from components.models.weights import check_weights
    from components.tracking.provenance import git_commit
    from components.tracking.store import check as check_tracking
    from components.tracking.store import local_uri, ui_command
    from flows import server
    from flows.console import Console, hush, logging_to
    from flows.interrupt import Interruption

    start = time.monotonic()
    root = Path(spec.root)
    refuse_secrets(spec.model_dump(mode="json", by_alias=True))
    overrides = mask_overrides(overrides)
    if spec.fork is not None:
        fork.named(spec, spec.fork.partition("@")[0])  # before anything is made below the root
    check_keys(spec)
    approval.check(spec)
    _writable(root)
    tracking_uri = spec.tracking.uri or local_uri(root)
    check_tracking(tracking_uri)
    context = Context.at(root, spec.store, lock_timeout=spec.compute.lock_timeout)
    context.store.check()
    forked = fork.resolve(spec, context.store)
    said = feedback.resolve(spec.feedback, context.store)
    hush()
    stdout = sys.stdout
    with ExitStack() as stack:
        interruption = stack.enter_context(Interruption())
        for model in (spec.model, *spec.teachers(), *spec.judges()):
            check_weights(model, context.cache)
        _deployable(spec, context)
        stack.enter_context(redirect_stdout(sys.stderr))  # what libraries print is no result
        console = Console()
        log = root / "logs" / f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        stack.enter_context(logging_to(log, console))
        console.line(f"{spec.name}, seed {spec.seed}; log: {log}")
        logger.info("overrides: %s", " ".join(overrides) or "none")
        if forked is not None:
            console.line(f"begins with the policy of run {forked.run.short} after step {forked.step}")
        stack.callback(context.warm.close)

        from flows import cached, results

        stages = cached.cached_stages(spec, context, forked, said)
        alone = sweep is None and not server.inside_flow()  # else the sweep or Prefect expects a run of its own
        earlier = cached.same_run(spec, forked, stages) if stages is not None and alone else None
        if stages is not None and earlier is not None:
            begun = (forked, said, start)
            found = cached.repeat(spec, context, console, log, stages, earlier, *begun)
            results.show(found, console, ui_command(tracking_uri), server.ui_command(root))
            print(found.to_json(), file=stdout, flush=True)
            return json.loads(found.to_json())
        prefect = None
        if stages is None or server.of_user():
            prefect = stack.enter_context(server.for_run(root, keep=sweep is not None))  # boots while we import
            interruption.last_words.append(prefect.kill)

        from flows import reports, tasks, tracking
        from flows.execution import Execution

        tracker = stack.enter_context(tracking.track(spec, overrides, sweep))
        interruption.last_words.append(lambda: tracker.finish("KILLED"))
        records = Records(root)
        dead = tracking.close_dead(records, tracker)
        record = stack.enter_context(
            recording(
                root,
                tracker.run_id,
                name=spec.name,
                seed=spec.seed,
                spec=spec.model_dump(mode="json", by_alias=True),
                overrides=overrides,
                sweep=sweep,
                git_commit=git_commit(CODE),
                forked=forked.checkpoints if forked else {},
            )
        )
        execution = Execution(spec, context, console, tracker, log, record)
        stack.callback(execution.close)
        logger.info("MLflow run %s", tracker.run_id)
        say_round = results.round_teller(execution)

        def body(call: Call, beside: Beside) -> results.Results:
            outcome = Outcome()
            asked = {"approve": approval.asker(execution)} if spec.deploy.approve else {}
            try:
                online_rl(spec, call, say_round, forked, execution.notice, beside, said, outcome, prune, **asked)
            except GuardStruck as guard:
                reports.struck(execution, outcome, overrides, time.monotonic() - start, str(guard))
                raise
            return results.conclude(execution, outcome, overrides, seconds=time.monotonic() - start)

        if prefect is None:
            found = body(execution.artifact, one_by_one(execution.artifact))
        else:
            found = tasks.run_flow("online-rl", execution, body, prefect, interruption, dead, records.close)
        line: dict[str, Any] = json.loads(found.to_json())
        record.run.result = line
        results.show(found, console, tracker.ui_command, server.ui_command(root))
    print(found.to_json(), file=stdout, flush=True)
    if found.deployment is not None and found.deployment.error is not None:
        raise found.deployment.error  # what was trained is kept; the command says that it is not in use
    return line


def _deployable(spec: ExperimentSpec, context: Context) -> None:
    """Raises ResourceError where the model could not be exported as it is wanted, or not deployed there."""
    from components.models.weights import folder

    deploy, base = spec.deploy, folder(spec.model, context.cache)
    if deploy.mode == "none":
        return
    if "gguf" in deploy.formats and (base / "config.json").is_file():  # else when it is there
        from components.deployment.gguf import check_architecture

        check_architecture(base)
    if deploy.target is not None:
        release.check(spec)
