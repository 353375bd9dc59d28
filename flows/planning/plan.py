"""Plan of a run, stage by stage, from the store and the records of earlier runs.

A stage with a recomputed input has no key yet. If that input turns out equal to that of an earlier run (same content,
same key), the stage is cached after all. So the plan is an upper bound, except for refills of a round, which depend on
its filter. Decisions from existing evaluations (early stopping, the best policy) are the same as in the run; if
evaluations are pending, the plan continues to the last round and says that it is an upper bound.

Times are medians over the most similar earlier stages: per episode if the numbers of episodes differ, per collection if
a reward model learns from several. The cost of judges is their cost per episode in the latest stage with the same
reward. Background work (`collect.overlap`) counts only by the time that exceeds the stage beside it. A stage that was
killed and retried counts with its last attempt only. The price of a machine-hour comes from `compute.prices`; for a
SkyPilot machine without a price there, from SkyPilot's optimizer. Files are not verified: the run detects damaged ones.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from components.artifacts import Artifact, Store, stage_key
from components.compute.sky.failures import wanted
from components.compute.sky.offers import Offer, offers
from components.compute.sky.spec import SkyPlace
from components.compute.spec import StageName
from components.errors import GuardStruck, ResourceError
from components.rewards.llm.spec import PaidSpec, asked_by
from components.rollout.live_view import FILE as LIVE
from components.rollout.spec import CollectSpec
from flows.execution.overlap import BackgroundResult, T, sequential
from flows.experiment import feedback
from flows.experiment.correction import truncation_reason
from flows.experiment.fork import resolve
from flows.experiment.guards import RULES
from flows.experiment.prerequisites import lacking
from flows.experiment.requests import StageRunner
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
"""Place of background work."""
MOST_DIFFERENCES = 4
"""Maximum number of differences shown per stage."""


@dataclass(frozen=True)
class Planned:
    """Planned stage."""

    label: str
    stage: str
    step: int
    inputs: dict[str, str]
    """Label of the stage that produces each input, by input name."""
    status: str
    """`cached`: in the store, or produced by an earlier stage of this run. `unfinished`: an interrupted attempt can be
    resumed. `run`: not cached."""
    why: list[str]
    """Reasons why the stage is not cached: differences from the most similar earlier stage."""
    where: str
    """Name of the place; for a remote machine also the requested resources."""
    seconds: float | None
    """Estimated time; 0 if cached, None if no similar stage has run."""
    cost: float | None
    """Cost of the machine, by the prices in `compute`, and of judges; None if the time or a price is unknown."""
    key: str | None
    """Stage key; None if an input is pending."""
    beside: str | None = None
    """Label of the stage beside which it runs in the background; None if the run waits for it."""
    unnoticed: float = 0.0
    """Seconds that overlap with the stage beside it, for which the run does not wait."""
    episodes: int | None = None
    """Maximum number of episodes, including second attempts, continuations, and those of other players and a teacher.
    None for other stages, and for an evaluation on all scenarios of its split."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run."""

    experiment: str
    root: str
    stages: list[Planned]
    notes: list[str] = field(default_factory=list)
    """Messages on the course of the run: missing prerequisites, early stopping, guards, the choice of the policy."""
    at_most: bool = False
    """True if the run may end before the last of these stages."""

    def count(self, status: str) -> int:
        """Return the number of stages with this status."""
        return sum(stage.status == status for stage in self.stages)

    @property
    def seconds(self) -> float | None:
        """Estimated time of the run; None if that of a stage is unknown."""
        return _sum(None if stage.seconds is None else stage.seconds - stage.unnoticed for stage in self.stages)

    @property
    def cost(self) -> float | None:
        """Estimated cost of the run; None if that of a stage is unknown."""
        return _sum(stage.cost for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {**asdict(self), "seconds": self.seconds, "cost": self.cost}


def plan(spec: ExperimentSpec, ask: Callable[[Mapping[str, SkyPlace]], dict[str, Offer]] = offers) -> RunPlan:
    """Return the plan of one run. ask: query SkyPilot's offers for places without a price.

    Raises SpecError and ResourceError as the checks before a run do."""
    context = Context.at(spec.root, spec.store)
    planner = _Planner(spec, context, Records(spec.root), ask)
    fork = resolve(spec, context.store)
    if fork is not None:
        planner.register(fork.checkpoint, f"{fork.run.short}@{fork.step}")
        if fork.reference is not None:
            planner.register(fork.reference, f"{fork.run.short}@0")
        for step, checkpoint in fork.followed.items():
            planner.register(checkpoint, f"{fork.run.short}@{step}")
        for rounds in (fork.earlier, fork.anchored):
            for ago, artifacts in enumerate(rounds):
                for artifact in artifacts.values():
                    planner.register(artifact, f"{fork.run.short} {artifact.stage}[{fork.step - ago or 'sft'}]")
    feedback_data = feedback.resolve(spec.feedback, context.store)
    for name, artifact in (feedback_data.artifacts if feedback_data is not None else {}).items():
        planner.register(artifact, f"annotated {name}")
    notices: list[Notice] = []
    guard_error = None
    try:
        online_rl(
            spec,
            planner.call,
            begin=fork,
            on_notice=notices.append,
            beside=planner.beside,
            feedback=feedback_data,
        )
    except GuardStruck as error:
        guard_error = error
    missing = [f"the run cannot start yet: {text}" for text in (*lacking(spec), *_deployment_problems(spec))]
    notes = [
        *missing,
        *_resolved_values(spec),
        *(notice.message for notice in notices if notice.kind in ("early_stopping", "best")),
        *planner.prices(),
    ]
    if guard_error is not None:
        return RunPlan(spec.name, spec.root, planner.planned, [*notes, f"a guard ends the run: {guard_error}"])
    pending = _pending_decisions(spec, planner.planned, {notice.kind for notice in notices})
    at_most = "end" in pending and "refills" not in pending
    return RunPlan(spec.name, spec.root, planner.planned, [*notes, *pending.values()], at_most)


def _resolved_values(spec: ExperimentSpec) -> Iterator[str]:
    """Yield a message for each automatic value of the configuration, with its resolved value and the reason."""
    if spec.rounds and (reason := truncation_reason(spec)) is not None:
        yield f"algorithm.correction=auto resolves to truncate: {reason}"


def _deployment_problems(spec: ExperimentSpec) -> Iterator[str]:
    """Yield a message if a prerequisite of `deploy.target` is missing."""
    if spec.deploy.target is not None:
        try:
            deployment.check(spec)
        except ResourceError as error:
            yield str(error)


def _pending_decisions(spec: ExperimentSpec, planned: Sequence[Planned], decided: set[str]) -> dict[str, str]:
    """Return messages on decisions that only the run can take, by kind: `refills`, `end`, `best`."""
    messages: dict[str, str] = {}
    if spec.collect.refills and any(stage.stage == "filter" and stage.status != "cached" for stage in planned):
        messages["refills"] = (
            f"the plan excludes up to {spec.collect.refills} refills of each round, each collected, judged and "
            "filtered: the filter of the round decides on them"
        )
    before_end = {stage.label for stage in planned if stage.status != "cached"} - {"evaluate[final]"}
    pending = {stage.stage for stage in planned if stage.status != "cached"}
    rules = []
    if (
        spec.early_stopping is not None
        and "early_stopping" not in decided
        and any(label.startswith("evaluate") for label in before_end)
    ):
        rules.append("early stopping")
    for name, stages in RULES.items():
        if getattr(spec.guards, name) == "stop" and pending & set(stages):
            rules.append(f"guards.{name}")
    if rules:
        messages["end"] = f"this is an upper bound: {' or '.join(rules)} may end the run earlier"
    if spec.rounds and spec.deploy.policy == "best" and "best" not in decided:
        messages["best"] = "the plan takes the last policy as the best; the run chooses it after all evaluations"
    return messages


class _Planner:
    """Recorder of an experiment's stages that looks each one up in the store in place of running it."""

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
        self._earlier = [(run, stage) for run in records.all() for stage in run.stages]
        self._labels: dict[str, str] = {}
        self._requests: list[tuple[Request, Artifact]] = []

    def register(self, artifact: Artifact, label: str) -> None:
        """Register an artifact that exists before the first stage."""
        self._store.known[artifact.key] = artifact
        self._labels[artifact.key] = label

    def _where(self, stage: str) -> str:
        """Return the name of the place and the requested resources."""
        name = self.spec.compute.placement(stage)  # type: ignore[arg-type]  # a stage's name
        place = self.spec.compute.places[name]
        return f"{name}: {wanted(place)}" if isinstance(place, SkyPlace) else name

    def _price(self, stage: str) -> float | None:
        """Return the price of an hour of the stage's machine; None if unknown."""
        compute = self.spec.compute
        price = compute.hourly_price(stage)  # type: ignore[arg-type]  # a stage's name
        name = compute.placement(stage)  # type: ignore[arg-type]
        if price or not isinstance(compute.places[name], SkyPlace):
            return price
        if self._offers is None:
            unpriced = {compute.placement(kind) for kind in get_args(StageName) if not compute.hourly_price(kind)}
            places = {place: compute.places[place] for place in sorted(unpriced)}
            self._offers = self._ask({key: place for key, place in places.items() if isinstance(place, SkyPlace)})
        return self._offers[name].price

    def prices(self) -> Iterator[str]:
        """Yield a message for each place of a pending stage with its offer by SkyPilot."""
        pending = [stage for stage in self.planned if stage.status != "cached"]
        used = {self.spec.compute.placement(stage.stage) for stage in pending}  # type: ignore[arg-type]
        for name, offer in (self._offers or {}).items():
            if name not in used:
                continue
            if offer.price is None:
                yield f"{name}: unknown price: {offer.problem}"
            else:
                source = "by SkyPilot's optimizer; set compute.prices to count it in the run's cost"
                yield f"{name}: {offer.machine}, {offer.price:.2f} per hour {source}"

    def call(self, label: str, step: int, request: Request) -> Artifact:
        """Plan a stage. Return its artifact, or a placeholder if it is pending."""
        missing = [name for name, key in request.inputs.items() if key not in self._store.known]
        part = key_part(request)
        key = None if missing else self._key(request, part)
        artifact = self._store.find(key) if key else None
        if artifact is not None:
            check_schema(artifact)
        same = next((result for earlier, result in self._requests if earlier == request), None)
        artifact = artifact or same
        near = self._near(label, request, part)
        nearest = near[0] if near else None
        seconds = statistics.median(stage.seconds_for(request) for stage in near) if near else None
        status = "unfinished" if key and _has_scratch(self.context.store, key) else "run"
        if artifact is not None:
            status, seconds = "cached", 0.0
        price = 0.0 if artifact is not None else self._price(request.stage)
        judge_cost = 0.0 if artifact is not None else self._judge_cost(request, part)
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
                cost=(
                    None
                    if seconds is None or judge_cost is None or price is None
                    else seconds / 3600 * price + judge_cost
                ),
                key=key,
                episodes=most_episodes(request),
            )
        )
        if artifact is None:
            artifact = _placeholder(label, request.stage)
        self._labels.setdefault(artifact.key, label)
        self._requests.append((request, artifact))
        return artifact

    @contextmanager
    def beside(self, label: str, work: Callable[[StageRunner], T]) -> Iterator[BackgroundResult[T]]:
        """Plan background work after the stage beside which it runs."""
        start = len(self.planned)
        with sequential(self.call)(label, work) as result:
            yield result
            foreground = self.planned[start:]
            start += len(foreground)
        remaining = sum(stage.seconds or 0.0 for stage in foreground)
        for index, stage in enumerate(self.planned[start:], start):
            overlap = min(stage.seconds or 0.0, remaining)
            remaining -= overlap
            prices = [self._price(kind) or 0.0 for kind in (stage.stage, foreground[0].stage)] if overlap else [0.0]
            saved = overlap / 3600 * min(prices)
            cost = None if stage.cost is None else stage.cost - saved
            self.planned[index] = replace(stage, beside=label, where=PROCESS, unnoticed=overlap, cost=cost)

    def _key(self, request: Request, part: dict[str, Any]) -> str:
        stage = STAGES[request.stage]
        digests = {name: self._store.known[key].digest for name, key in request.inputs.items()}
        return stage_key(stage.name, stage.version, part, digests, request.seed)

    def _judge_cost(self, request: Request, part: dict[str, Any]) -> float | None:
        """Return the cost of a stage's paid judges; None if unknown."""
        own = self.spec.evaluate.reward if request.stage == "evaluate" else None
        if "reward" not in part or not any(isinstance(judge, PaidSpec) for judge in asked_by(own or self.spec.reward)):
            return 0.0
        episodes = most_episodes(request)
        if request.stage == "judge":
            source = self._labels.get(request.inputs["trajectories"])
            episodes = next((stage.episodes for stage in self.planned if stage.label == source), None)
        for _, record in self._earlier:
            manifest = self._store.manifest(record.key)
            if manifest is None or manifest["spec"].get("reward") != part["reward"]:
                continue
            figures = manifest["metrics"]
            count = figures.get("scored", 0.0) + figures.get("unscored", 0.0)
            if count and episodes is not None and "unpriced" not in figures:
                return float(figures["cost"]) / count * episodes
        return None

    def _near(self, label: str, request: Request, part: dict[str, Any]) -> list[_Near]:
        """Return the earlier stages of the same kind (stage, actor and algorithm) with the fewest differences, first
        those with the same label, latest first."""
        ranked: list[tuple[tuple[int, bool], _Near]] = []
        for run, record in self._earlier:
            if record.request["stage"] != request.stage or _kind(record.request["spec"]) != _kind(request.spec):
                continue
            manifest = self._store.manifest(record.key)
            if manifest is None:
                continue
            changes = list(_changes(manifest["spec"], part))
            rank = (len(changes) + (record.request["seed"] != request.seed), record.label != label)
            ranked.append((rank, _Near(run, record, changes, manifest["seconds"])))
        ranked.sort(key=lambda pair: pair[0])
        return [near for (count, _), near in ranked if count == ranked[0][0][0]]

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
            return ["resumes an interrupted attempt"]
        deleted = [run.short for run, record in self._earlier if record.key == key]
        if deleted:
            return [f"run {deleted[0]} had it, but it is no longer in the store"]
        if nearest is None:
            return ["no similar stage has run"]
        reasons = [f"{path}: {before} → {after}" for path, before, after in nearest.changes[:MOST_DIFFERENCES]]
        if len(nearest.changes) > MOST_DIFFERENCES:
            reasons.append(f"{len(nearest.changes) - MOST_DIFFERENCES} more differences")
        if nearest.stage.request["seed"] != request.seed:
            reasons.append(f"seed: {nearest.stage.request['seed']} → {request.seed}")
        if nearest.stage.version != STAGES[request.stage].version:
            reasons.append(f"version of the stage: {nearest.stage.version} → {STAGES[request.stage].version}")
        reasons += [f"{name}: {self._labels[request.inputs[name]]} is recomputed" for name in missing]
        inputs = nearest.stage.request["inputs"]
        for name, key in request.inputs.items():
            if name not in missing and inputs.get(name) != key:
                reasons.append(f"{name}: differs from run {nearest.run.short}")
        reasons += [f"{name}: none, unlike run {nearest.run.short}" for name in inputs if name not in request.inputs]
        return reasons


@dataclass(frozen=True)
class _Near:
    """Earlier stage that is similar to a planned one."""

    run: RunRecord
    stage: StageRecord
    changes: list[tuple[str, str, str]]
    seconds: float
    """Time that the stage took."""

    def seconds_for(self, request: Request) -> float:
        """Return the estimated time of another stage of this kind, scaled by size if both sizes are known."""
        size, own_size = _size(request), _size(Request.from_json(self.stage.request))
        return self.seconds * size / own_size if size and own_size else self.seconds


def _kind(spec: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the actor and the algorithm of a stage, as far as it has them."""
    return spec.get("actor"), spec.get("algorithm", {}).get("name")


def _has_scratch(store: Store, key: str) -> bool:
    """Return True if an interrupted attempt of the stage left files."""
    scratch = store.root / ".scratch" / key
    return scratch.is_dir() and any(path.name != LIVE for path in scratch.iterdir())


def _placeholder(label: str, stage: str) -> Artifact:
    """Return a stand-in for the artifact of a pending stage, without a digest."""
    return Artifact(label, STAGES[stage].kind, stage, 0, "", Path(label), {}, {}, (), 0.0)


def _changes(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (path, value before, value after) of each leaf that differs."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*before, *(name for name in after if name not in before)]:
            below = f"{path}.{name}" if path else str(name)
            yield from _changes(before.get(name, "–"), after.get(name, "–"), below)
    elif before != after:
        if path == "round":  # the spec counts rounds from 0, messages from 1
            before, after = before + 1, after + 1
        yield path, _text(before), _text(after)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _size(request: Request) -> int | None:
    """Return the number of episodes of a stage, or of collections that a reward model learns from. None for other
    stages, and for an evaluation on all scenarios."""
    if request.stage == "reward_model":
        return collections(request.inputs)
    if request.stage == "collect":
        return int(request.spec["collect"]["scenarios"] * request.spec["collect"]["group_size"])
    return request.spec["evaluate"]["scenarios"] if request.stage == "evaluate" else None


def most_episodes(request: Request) -> int | None:
    """Return the maximum number of episodes of a stage (see `Planned.episodes`)."""
    if request.stage == "evaluate":
        return request.spec["evaluate"]["scenarios"]
    if request.stage != "collect":
        return None
    collect = CollectSpec.model_validate(request.spec["collect"])
    actor = request.spec["actor"]
    if actor == "solver":
        return collect.scenarios
    first = collect.scenarios * collect.group_size
    if actor == "teacher":
        return first
    turns = request.spec["agent"]["max_turns"]
    taught = collect.scenarios * min(collect.teacher.samples, collect.group_size) if collect.teacher else 0
    twice = collect.reflection is not None or collect.opponent == "policy"
    return first * (1 + twice + (turns - 1) * collect.continuations) + taught


def _sum(values: Iterator[float | None]) -> float | None:
    """Return the sum of the values; None if one is None."""
    summands = list(values)
    return None if None in summands else sum(value for value in summands if value is not None)
