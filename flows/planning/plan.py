"""What a run would do, stage by stage, from the store and the records of earlier runs: `plan`.

A stage whose input will be made anew has no key yet. Should that input turn out to be what an earlier run had (equal
content, equal key), then the stage is found after all; so the plan is what will happen at most, but for refills of a
round, which are known when it is filtered. What the flow decides from evaluations that are there (to end the rounds
early, which policy is the best) it decides here as it will in the run; where they are not made yet, the plan goes on to
the last round and says that this is the most.

Times are medians over the nearest earlier stages of this kind, by episode where the numbers of episodes differ, and by
collection where a reward model learns from more than one. What judges cost is what they did for an episode in the
latest stage with the same reward. What runs beside a stage (`collect.overlap`) takes only the
time by which it is longer. A stage that was killed on its way counts with its last try
only. An hour of a machine costs what `compute.prices` says; where it says nothing of a machine that SkyPilot provides,
what SkyPilot's optimizer says. Files are not verified: what is damaged is found by the run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from components.algorithms.spec import PolicyGradientSpec
from components.artifacts import Artifact, Store, stage_key
from components.compute.sky.failures import wanted
from components.compute.sky.offers import Offer, offers
from components.compute.sky.spec import SkyPlace
from components.compute.spec import StageName
from components.errors import GuardStruck, ResourceError
from components.rewards.llm.spec import PaidSpec, asked_by
from components.rollout.live_view import FILE as LIVE
from components.rollout.spec import CollectSpec
from flows.execution.overlap import Ahead, Found, one_by_one
from flows.experiment import feedback
from flows.experiment.correction import difference
from flows.experiment.fork import resolve
from flows.experiment.guards import RULES
from flows.experiment.prerequisites import lacking
from flows.experiment.requests import Call
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Notice, Records, RunRecord, StageRecord
from flows.history.store_reader import Peek
from flows.recipes.online_rl import online_rl
from flows.release import deployment
from flows.stages import STAGES
from flows.stages.base import Context, Request
from flows.stages.execute import check_schema, key_part
from flows.stages.reward_model import collections

PROCESS = "process"
"""Where what is done beside a stage runs."""
MOST_DIFFERENCES = 4
"""Differences that are shown of one stage."""


@dataclass(frozen=True)
class Planned:
    """One stage of a run that has not started."""

    label: str
    stage: str
    step: int
    inputs: dict[str, str]
    """Name of each input and the label of the stage that makes it."""
    status: str
    """`cached`: in the store, or it will be, because an earlier stage of this run makes the same. `unfinished`: an
    earlier try has left something to go on from. `run`."""
    why: list[str]
    """Where it will run: what differs from the nearest earlier stage."""
    where: str
    """Its place by name, and of a machine elsewhere what is asked for."""
    seconds: float | None
    """0 where it is cached; None where nothing like it has run."""
    cost: float | None
    """Of the machine, by the prices in `compute`, and of judges; None where the time or their cost is not known."""
    key: str | None
    """None where an input is not made yet."""
    beside: str | None = None
    """Label of the stage during which it runs; None where the run waits for it."""
    unnoticed: float = 0.0
    """Seconds of it for which the run does not wait."""
    episodes: int | None = None
    """That it plays at most: second attempts, other players', a teacher's and continuations are counted too. None of
    other stages, and of an evaluation on all scenarios of its split."""


@dataclass(frozen=True)
class Plan:
    """A run that has not started."""

    experiment: str
    root: str
    stages: list[Planned]
    notes: list[str] = field(default_factory=list)
    """What is known of the course of the run: that it ends early and why, that it may, that the best policy is chosen
    when all are evaluated."""
    at_most: bool = False
    """Whether the run may end before the last of these stages."""

    def count(self, status: str) -> int:
        return sum(one.status == status for one in self.stages)

    @property
    def seconds(self) -> float | None:
        """That the run takes; None where that of one stage is not known."""
        return _sum(None if one.seconds is None else one.seconds - one.unnoticed for one in self.stages)

    @property
    def cost(self) -> float | None:
        return _sum(one.cost for one in self.stages)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "cost": self.cost}


def plan(spec: ExperimentSpec, ask: Callable[[Mapping[str, SkyPlace]], dict[str, Offer]] = offers) -> Plan:
    """The plan of one run. ask: what SkyPilot would take for places; only those of which nothing else says a price.
    Raises SpecError and ResourceError as the run would for what it finds before its start."""
    context = Context.at(spec.root, spec.store)
    planner = _Planner(spec, context, Records(spec.root), ask)
    fork = resolve(spec, context.store)
    if fork is not None:
        planner.given(fork.checkpoint, f"{fork.run.short}@{fork.step}")
        if fork.reference is not None:
            planner.given(fork.reference, f"{fork.run.short}@0")
        for step, checkpoint in fork.followed.items():
            planner.given(checkpoint, f"{fork.run.short}@{step}")
        for rounds in (fork.earlier, fork.anchored):
            for ago, one in enumerate(rounds):
                for artifact in one.values():
                    planner.given(artifact, f"{fork.run.short} {artifact.stage}[{fork.step - ago or 'sft'}]")
    said = feedback.resolve(spec.feedback, context.store)
    for name, artifact in (said.artifacts if said is not None else {}).items():
        planner.given(artifact, f"annotated {name}")
    notices: list[Notice] = []
    struck = None
    try:
        online_rl(spec, planner.call, begin=fork, on_notice=notices.append, beside=planner.beside, said=said)
    except GuardStruck as error:
        struck = error
    lacks = [f"it cannot begin yet: {text}" for text in (*lacking(spec), *_undeployable(spec))]
    decided = [
        *lacks,
        *_resolved(spec),
        *(one.message for one in notices if one.kind in ("early_stopping", "best")),
        *planner.prices(),
    ]
    if struck is not None:
        return Plan(spec.name, spec.root, planner.planned, [*decided, f"a guard ends the run: {struck}"])
    open_ = _undecided(spec, planner.planned, {one.kind for one in notices})
    return Plan(
        spec.name, spec.root, planner.planned, [*decided, *open_.values()], "end" in open_ and "refills" not in open_
    )


def _resolved(spec: ExperimentSpec) -> Iterator[str]:
    """Yield what automatic values of the configuration stand for, and why."""
    algorithm = spec.algorithm
    if not isinstance(algorithm, PolicyGradientSpec) or algorithm.correction != "auto" or not spec.rounds:
        return
    if (reason := difference(spec, algorithm)) is not None:
        yield f"algorithm.correction=auto stands for truncate: {reason}"


def _undeployable(spec: ExperimentSpec) -> Iterator[str]:
    """What `deploy.target` lacks."""
    if spec.deploy.target is not None:
        try:
            deployment.check(spec)
        except ResourceError as error:
            yield str(error)


def _undecided(spec: ExperimentSpec, planned: Sequence[Planned], decided: set[str]) -> dict[str, str]:
    """What is decided only in the run: `refills`, `end`, `best`."""
    found: dict[str, str] = {}
    if spec.collect.refills and any(one.stage == "filter" and one.status != "cached" for one in planned):
        found["refills"] = (
            f"up to {spec.collect.refills} further collections of each round, each judged and filtered, are not in it: "
            "whether they are needed is known when the round is filtered"
        )
    before_end = {one.label for one in planned if one.status != "cached"} - {"evaluate[final]"}
    unknown = {one.stage for one in planned if one.status != "cached"}
    rules = []
    if (
        spec.early_stopping is not None
        and "early_stopping" not in decided
        and any(label.startswith("evaluate") for label in before_end)
    ):
        rules.append("early stopping")
    for name, stages in RULES.items():
        if getattr(spec.guards, name) == "stop" and unknown & set(stages):
            rules.append(f"guards.{name}")
    if rules:
        found["end"] = f"these are the most: {' or '.join(rules)} may end the run before"
    if spec.rounds and spec.deploy.policy == "best" and "best" not in decided:
        found["best"] = "which policy is the best is known when all are evaluated; here it is the last one"
    return found


class _Planner:
    """Walks the stages of an experiment and asks the store about each, in place of running it."""

    def __init__(
        self,
        spec: ExperimentSpec,
        context: Context,
        records: Records,
        ask: Callable[[Mapping[str, SkyPlace]], dict[str, Offer]],
    ):
        self.spec = spec
        self._ask = ask
        self._offers: dict[str, Offer] | None = None
        self.context = context
        self.planned: list[Planned] = []
        self._store = Peek(context.store)
        self._earlier = [(run, one) for run in records.all() for one in run.stages]
        self._labels: dict[str, str] = {}
        self._asked: list[tuple[Request, Artifact]] = []

    def given(self, artifact: Artifact, label: str) -> None:
        """An artifact that is there before the first stage."""
        self._store.known[artifact.key] = artifact
        self._labels[artifact.key] = label

    def _where(self, stage: str) -> str:
        """Name of the place, and what is asked for there."""
        name = self.spec.compute.placement(stage)  # type: ignore[arg-type]  # a stage's name
        place = self.spec.compute.places[name]
        return f"{name}: {wanted(place)}" if isinstance(place, SkyPlace) else name

    def _price(self, stage: str) -> float | None:
        """Of an hour of the stage's machine; None where it is not known."""
        compute = self.spec.compute
        price = compute.hourly_price(stage)  # type: ignore[arg-type]  # a stage's name
        name = compute.placement(stage)  # type: ignore[arg-type]
        if price or not isinstance(compute.places[name], SkyPlace):
            return price
        if self._offers is None:
            unpriced = {compute.placement(one) for one in get_args(StageName) if not compute.hourly_price(one)}
            places = {one: compute.places[one] for one in sorted(unpriced)}
            self._offers = self._ask({one: place for one, place in places.items() if isinstance(place, SkyPlace)})
        return self._offers[name].price

    def prices(self) -> Iterator[str]:
        """What was learned of the places of stages that will run."""
        used = {self.spec.compute.placement(one.stage) for one in self.planned if one.status != "cached"}  # type: ignore[arg-type]
        for name, offer in (self._offers or {}).items():
            if name not in used:
                continue
            if offer.price is None:
                yield f"{name}: its price is not known: {offer.problem}"
            else:
                said = "by SkyPilot's optimizer; the run counts it where compute.prices says it"
                yield f"{name}: {offer.machine}, {offer.price:.2f} an hour {said}"

    def call(self, label: str, step: int, request: Request) -> Artifact:
        missing = [name for name, key in request.inputs.items() if key not in self._store.known]
        part = key_part(request)
        key = None if missing else self._key(request, part)
        artifact = self._store.find(key) if key else None
        if artifact is not None:
            check_schema(artifact)
        before = next((made for asked, made in self._asked if asked == request), None)
        artifact = artifact or before
        near = self._near(label, request, part)
        nearest = near[0] if near else None
        seconds = statistics.median(one.seconds_for(request) for one in near) if near else None
        status = "unfinished" if key and _begun(self.context.store, key) else "run"
        if artifact is not None:
            status, seconds = "cached", 0.0
        price = 0.0 if artifact is not None else self._price(request.stage)
        judged = 0.0 if artifact is not None else self._judged(request, part)
        self.planned.append(
            Planned(
                label=label,
                stage=request.stage,
                step=step,
                inputs={name: self._labels.get(key, key[:12]) for name, key in request.inputs.items()},
                status=status,
                why=[] if artifact else self._why(request, key, part, nearest, missing, status),
                where=self._where(request.stage),
                seconds=seconds,
                cost=None if seconds is None or judged is None or price is None else seconds / 3600 * price + judged,
                key=key,
                episodes=most_episodes(request),
            )
        )
        if artifact is None:
            artifact = _to_be_made(label, request.stage)
        self._labels.setdefault(artifact.key, label)
        self._asked.append((request, artifact))
        return artifact

    @contextmanager
    def beside(self, label: str, work: Callable[[Call], Found]) -> Iterator[Ahead[Found]]:
        """What is done beside a stage is planned after it."""
        before = len(self.planned)
        with one_by_one(self.call)(label, work) as ahead:
            yield ahead
            during = self.planned[before:]
            before += len(during)
        left = sum(one.seconds or 0.0 for one in during)
        for place, one in enumerate(self.planned[before:], before):
            unnoticed = min(one.seconds or 0.0, left)
            left -= unnoticed
            prices = [self._price(kind) or 0.0 for kind in (one.stage, during[0].stage)] if unnoticed else [0.0]
            spared = unnoticed / 3600 * min(prices)
            cost = None if one.cost is None else one.cost - spared
            self.planned[place] = replace(one, beside=label, where=PROCESS, unnoticed=unnoticed, cost=cost)

    def _key(self, request: Request, part: dict[str, Any]) -> str:
        stage = STAGES[request.stage]
        digests = {name: self._store.known[key].digest for name, key in request.inputs.items()}
        return stage_key(stage.name, stage.version, part, digests, request.seed)

    def _judged(self, request: Request, part: dict[str, Any]) -> float | None:
        """What judges of a network cost that a stage asks; None where it is not known."""
        own = self.spec.evaluate.reward if request.stage == "evaluate" else None
        if "reward" not in part or not any(isinstance(one, PaidSpec) for one in asked_by(own or self.spec.reward)):
            return 0.0
        episodes = most_episodes(request)
        if request.stage == "judge":
            source = self._labels.get(request.inputs["trajectories"])
            episodes = next((one.episodes for one in self.planned if one.label == source), None)
        for _, one in self._earlier:
            manifest = self._store.manifest(one.key)
            if manifest is None or manifest["spec"].get("reward") != part["reward"]:
                continue
            figures = manifest["metrics"]
            judged = figures.get("scored", 0.0) + figures.get("unscored", 0.0)
            if judged and episodes is not None and "unpriced" not in figures:
                return float(figures["cost"]) / judged * episodes
        return None

    def _near(self, label: str, request: Request, part: dict[str, Any]) -> list[_Near]:
        """The earlier stages of this kind with the fewest differences; first one with the same label, the latest. A
        kind is also whose episodes they are, and which algorithm it is."""
        found: list[tuple[tuple[int, bool], _Near]] = []
        for run, one in self._earlier:
            if one.request["stage"] != request.stage or _kind(one.request["spec"]) != _kind(request.spec):
                continue
            manifest = self._store.manifest(one.key)
            if manifest is None:
                continue
            changes = list(_changes(manifest["spec"], part))
            rank = (len(changes) + (one.request["seed"] != request.seed), one.label != label)
            found.append((rank, _Near(run, one, changes, manifest["seconds"])))
        found.sort(key=lambda pair: pair[0])
        return [near for (changes, _), near in found if changes == found[0][0][0]]

    def _why(
        self,
        request: Request,
        key: str | None,
        part: dict[str, Any],
        nearest: _Near | None,
        missing: list[str],
        status: str,
    ) -> list[str]:
        if status == "unfinished":
            return ["an earlier try was stopped; what it had finished is used"]
        gone = [run.short for run, one in self._earlier if one.key == key]
        if gone:
            return [f"was in run {gone[0]}, but is no longer in the store"]
        if nearest is None:
            return ["nothing like it has run"]
        reasons = [f"{path}: {before} → {now}" for path, before, now in nearest.changes[:MOST_DIFFERENCES]]
        if len(nearest.changes) > MOST_DIFFERENCES:
            reasons.append(f"{len(nearest.changes) - MOST_DIFFERENCES} more differences")
        if nearest.stage.request["seed"] != request.seed:
            reasons.append(f"seed: {nearest.stage.request['seed']} → {request.seed}")
        if nearest.stage.version != STAGES[request.stage].version:
            reasons.append(f"version of the stage: {nearest.stage.version} → {STAGES[request.stage].version}")
        reasons += [f"{name}: {self._labels[request.inputs[name]]} is made anew" for name in missing]
        theirs = nearest.stage.request["inputs"]
        for name, key in request.inputs.items():
            if name not in missing and theirs.get(name) != key:
                reasons.append(f"{name}: another one than in run {nearest.run.short}")
        reasons += [f"{name}: none, as in run {nearest.run.short}" for name in theirs if name not in request.inputs]
        return reasons


@dataclass(frozen=True)
class _Near:
    run: RunRecord
    stage: StageRecord
    changes: list[tuple[str, str, str]]
    seconds: float
    """Time that it took when it was made."""

    def seconds_for(self, request: Request) -> float:
        """The time of another stage of this kind, by the size of both where both say how large they are."""
        ours, theirs = _size(request), _size(Request.from_json(self.stage.request))
        return self.seconds * ours / theirs if ours and theirs else self.seconds


def _kind(spec: Mapping[str, Any]) -> tuple[Any, Any]:
    """Whose episodes a stage collects, and by which algorithm it trains."""
    return spec.get("actor"), spec.get("algorithm", {}).get("name")


def _begun(store: Store, key: str) -> bool:
    scratch = store.root / ".scratch" / key
    return scratch.is_dir() and any(one.name != LIVE for one in scratch.iterdir())


def _to_be_made(label: str, stage: str) -> Artifact:
    return Artifact(label, STAGES[stage].kind, stage, 0, "", Path(label), {}, {}, (), 0.0)


def _changes(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, value before, value now) of each leaf that differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in [*before, *(name for name in now if name not in before)]:
            below = f"{path}.{name}" if path else str(name)
            yield from _changes(before.get(name, "–"), now.get(name, "–"), below)
    elif before != now:
        if path == "round":  # counted from 0 there, from 1 everywhere else
            before, now = before + 1, now + 1
        yield path, _shown(before), _shown(now)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _size(request: Request) -> int | None:
    """Episodes that a stage plays, collections that a reward model learns from; None of other stages, and where all
    scenarios are played."""
    if request.stage == "reward_model":
        return collections(request.inputs)
    if request.stage == "collect":
        return int(request.spec["collect"]["scenarios"] * request.spec["collect"]["group_size"])
    return request.spec["evaluate"]["scenarios"] if request.stage == "evaluate" else None


def most_episodes(request: Request) -> int | None:
    """As `Planned.episodes`."""
    if request.stage == "evaluate":
        return request.spec["evaluate"]["scenarios"]
    if request.stage != "collect":
        return None
    ways = CollectSpec.model_validate(request.spec["collect"])
    actor = request.spec["actor"]
    if actor == "solver":
        return ways.scenarios
    first = ways.scenarios * ways.group_size
    if actor == "teacher":
        return first
    turns = request.spec["agent"]["max_turns"]
    shown = ways.scenarios * min(ways.teacher.samples, ways.group_size) if ways.teacher else 0
    twice = ways.reflection is not None or ways.opponent == "policy"
    return first * (1 + twice + (turns - 1) * ways.continuations) + shown


def _sum(values: Iterator[float | None]) -> float | None:
    found = list(values)
    return None if None in found else sum(value for value in found if value is not None)
