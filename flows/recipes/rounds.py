"""Rounds of a run: collect, judge, filter and train, with what belongs to each round.

With `collect.overlap=K`, round r is collected by the policy after round r - 1 - K, or by that at the start of the
rounds, so it is min(r - 1, K) versions old when it is trained on. Its collection starts as soon as that policy exists:
with the training of round r - K. Reward models that are retrained follow the policy between the rounds. The policy may
be evaluated between the rounds (`evaluate.every`); early stopping and the pruning of a sweep decide on these
evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

from components.artifacts import Artifact
from flows.execution.overlap import BackgroundResult
from flows.experiment.early_stopping import EvaluatedPolicy, why_stop
from flows.history.records import Notice
from flows.recipes.episodes import FED, Episodes, order_error, training_inputs
from flows.recipes.reward_models import RewardModels
from flows.recipes.stage_calls import PolicyVersion, StageCalls
from flows.stages.anchors import CONTROL, FIRST, anchor_label, drift_metrics
from flows.stages.base import Request, StageRunner


class JudgeAnchors:
    """Anchors of one run: episodes of its first round. That round judges them twice, first and as a control; each later
    round judges them once, and is compared with both."""

    def __init__(self, run: StageCalls):
        self._run = run
        self._collection: Artifact | None = None
        self._compared: dict[str, Artifact] = {}
        self._first_round = 0
        self._judged: dict[int, Artifact] = {}

    @property
    def active(self) -> bool:
        """True if the experiment measures the judge's drift."""
        return self._run.spec.guards.judge_drift != "off"

    def judge(self, number: int, judged: Artifact, policy: Artifact | None, call: StageRunner) -> None:
        """Judge the anchors beside the episodes of a round. judged: these episodes. policy: as in `Requests.judge`."""
        if not self.active:
            return
        if self._collection is None:
            self._collection, self._first_round = judged, number
            first, control = (self._judge(time, judged, policy, call) for time in (number - 1, number))
            self._compared = {FIRST: first, CONTROL: control}
        else:
            self._judged[number] = self._judge(number, judged, policy, call)

    def check(self, number: int) -> None:
        """Let the guard compare the judgement of a round with the first. Raises GuardTriggered."""
        if number in self._judged:
            drift = drift_metrics(self._judged[number].metrics)
            self._run.guards.judged_again(number, drift, self._run.spec.rounds - self._first_round)

    def _judge(self, number: int, judged: Artifact, policy: Artifact | None, call: StageRunner) -> Artifact:
        assert self._collection is not None
        request = self._run.requests.judge_anchors(self._collection, number, judged, self._compared, policy)
        return call(anchor_label(number), number, request)


STALENESS = "policy versions behind, at most"
"""Name of the age of the oldest tokens that a run trained on, among its results."""


class RoundLoop:
    """Rounds of one run."""

    def __init__(self, run: StageCalls, policy: PolicyVersion, reward_models: RewardModels | None):
        fork = run.start.fork
        self.run = run
        self.policy = policy
        self.models = reward_models or RewardModels(run)
        self.anchor = policy.checkpoint
        self.reference = fork.reference if fork and not run.start.feedback else policy.checkpoint
        self.anchored = run.trained_before
        """Training inputs of the anchor, latest first."""
        self.earlier = list(fork.earlier) if fork else []
        """Training inputs of earlier rounds, latest first."""
        self.replayed: list[dict[str, Artifact]] | None = None
        """Training inputs that are replayed; None: those of all earlier rounds."""
        self.anchors = JudgeAnchors(run)
        self.background: BackgroundResult | None = None
        """Episodes of the next round, if they were collected in the background."""
        self.collected: dict[int, Artifact] = {}
        """Collection of each round."""
        self.first = policy.step
        """Step of the policy at the start of the rounds."""
        self._started = policy.step + 1
        """Last round whose collection was started; the first one begins when it is gathered."""

    def play(self) -> Iterator[Round]:
        """Yield each round, and do what follows it. Raises SpecError if a recipe did not train in a round."""
        run, outcome = self.run, self.run.outcome
        outcome.measured.append(EvaluatedPolicy(self.policy.step, self.policy.checkpoint, outcome.last))
        outcome.reward_models = self.models.trained
        fork = run.start.fork
        for step, policy in {0: self.reference, **(fork.followed if fork else {})}.items():
            self.models.follow(step, policy)  # a fork gets those of the source run from the cache
        try:
            yield from self._rounds()
        finally:
            run.background.close()

    def _rounds(self) -> Iterator[Round]:
        run, spec, outcome = self.run, self.run.spec, self.run.outcome
        numbers = range(self.policy.step + 1, spec.rounds + 1)
        for number in numbers if numbers and not run.pruned() else ():
            current = Round(self, number, self.policy)
            yield current
            if current.trained is None:
                raise order_error(f"does not train in round {number}; call round.train in each round")
            self.policy = current.trained
            if spec.evaluate.every and number % spec.evaluate.every == 0 and number < spec.rounds:
                run.measure(self.policy, f"evaluate[{number}]")
                if spec.early_stopping and (reason := why_stop(outcome.measured, spec.early_stopping)):
                    outcome.stopped = reason
                    run.on_notice(Notice("early_stopping", number, reason))
                    break
                if run.pruned():
                    break
            self.models.attack(number, outcome.rounds[-1], current.policy.checkpoint)
            self.models.follow(number, self.policy.checkpoint)

    def train(self, number: int, policy: PolicyVersion, request: Request) -> Artifact:
        """Train a round beside the collections of later rounds that the policy at its start plays. At the end, the next
        round is collected."""
        run, label = self.run, f"train[{number}]"
        rounds, overlap = run.spec.rounds, run.spec.collect.overlap
        last = min(number + overlap, rounds)
        works = [partial(self.gather, run, policy, later) for later in range(self._started + 1, last + 1)]
        self._started = max(self._started, last)
        beside = run.background(label, *works) if overlap and number < rounds else nullcontext()
        with beside as self.background:
            return run.call(label, number, request)

    def gather(self, run: StageCalls, policy: PolicyVersion, number: int, call: StageRunner) -> list[Episodes]:
        """Collect, judge and filter the episodes of a round, with refills after the filter kept too few scenarios, and
        judge the anchors."""
        spec, requests, models = run.spec, run.requests, self.models.current

        def gather(name: str, request: Request) -> Episodes:
            trajectories = call(f"collect[{name}]", number, request)
            scores = call(f"judge[{name}]", number, requests.judge(trajectories, policy.checkpoint, models))
            selection = call(f"filter[{name}]", number, requests.filter(trajectories, scores))
            return Episodes(name, number, trajectories, scores, selection)

        paused = self.collected.get(number - spec.collect.continues_after) if spec.collect.partial else None
        gathered = [gather(str(number), requests.collect(policy.checkpoint, number, paused=paused))]
        self.collected[number] = gathered[0].trajectories
        self.anchors.judge(number, gathered[0].trajectories, policy.checkpoint, call)
        drawn, remaining = 0, _scenarios(gathered[0])
        for refill in range(1, spec.collect.refills + 1):
            if remaining is None or remaining >= spec.collect.scenarios:
                break
            missing = spec.collect.scenarios - int(remaining)
            request = requests.collect(policy.checkpoint, number, further=(drawn, missing))
            gathered.append(gather(f"{number}+{refill}", request))
            drawn += missing
            more = _scenarios(gathered[-1])
            remaining += missing if more is None else more
        return gathered


def _scenarios(episodes: Episodes) -> float | None:
    """Return the number of scenarios that the filter kept; None if unknown."""
    assert episodes.selection is not None
    return episodes.selection.metrics.get("scenarios")


class Round:
    """One round of a run."""

    def __init__(self, rounds: RoundLoop, number: int, policy: PolicyVersion):
        self.number = number
        """Number of the round, from 1."""
        self.policy = policy
        """Policy at its start."""
        self.trained: PolicyVersion | None = None
        """Policy at its end."""
        self._rounds = rounds

    def consolidate(self) -> None:
        """Make the current policy what `ewc` and `replay` preserve from now on: its weights become the anchor, the last
        `ewc.rounds` rounds give the trajectories of the Fisher information, and only rounds before this one are
        replayed. Before the first round both come from the warmup."""
        rounds, ewc = self._rounds, self._rounds.run.spec.ewc
        rounds.replayed = list(rounds.earlier)
        rounds.anchor = self.policy.checkpoint
        if rounds.earlier and ewc is not None:
            rounds.anchored = rounds.earlier[: ewc.rounds]

    def gather(self, using: StageCalls | None = None) -> list[Episodes]:
        """Collect, judge and filter the episodes of the round; with `collect.overlap` they exist already. The first
        item is the round's collection, those of refills follow. Raises GuardTriggered; SpecError with `using` and
        `collect.overlap`.

        using: stages with other sections of the experiment (`Run.using`); by default the run's own."""
        rounds, guards = self._rounds, self._rounds.run.guards
        if using is not None:
            rounds.run.refuse_overlap()
        gathered: list[Episodes] = (
            rounds.gather(using or rounds.run, self.policy, self.number, rounds.run.call)
            if rounds.background is None
            else rounds.background.value
        )
        first = gathered[0].inputs()
        guards.gathered(
            self.number, first["trajectories"], first["scores"], max(rounds.run.outcome.reward_models, default=0)
        )
        rounds.anchors.check(self.number)
        selections = [episodes.inputs()["selection"] for episodes in gathered]
        largest = max(selections, key=lambda selection: selection.metrics.get("kept", 0.0))
        guards.filtered(f"filter[{self.number}]", self.number, largest)
        return gathered

    def train(
        self, data: Sequence[Episodes], start: PolicyVersion | None = None, roles: Sequence[str] | None = None
    ) -> PolicyVersion:
        """Return the policy after training on the data with `algorithm`. start: the policy to train further; by
        default that of the round's start. roles: agents whose histories are trained; None: all.
        Raises SpecError for data without scores or selection."""
        rounds, run, number = self._rounds, self._rounds.run, self.number
        inputs = training_inputs(data)
        request = run.requests.train(
            inputs,
            number,
            start=(start or self.policy).checkpoint,
            reference=rounds.reference,
            earlier=rounds.earlier if rounds.replayed is None else rounds.replayed,
            anchor=rounds.anchor,
            anchored=rounds.anchored,
            roles=roles,
        )
        rounds.earlier.insert(0, inputs)
        checkpoint = rounds.train(number, self.policy, request)
        self.trained = PolicyVersion(checkpoint, number)
        if oldest := min(number - 1 - rounds.first, run.spec.collect.staleness(run.spec.agent.max_turns)):
            run.report(STALENESS, float(oldest))
        run.outcome.checkpoint, run.outcome.step = checkpoint, number
        latest = next((episodes for episodes in reversed(data) if episodes.name == str(number)), data[-1])
        parts = zip(("collect", "judge", "filter"), (latest.inputs()[name] for name in FED), strict=True)
        artifacts: dict[str, Artifact] = {**dict(parts), "train": checkpoint}
        run.outcome.rounds.append(artifacts)
        run.on_round(number, artifacts)
        run.guards.trained(number, checkpoint)
        return self.trained
