"""Plan of a run, stage by stage, from the store and the records of earlier runs.

A stage with a recomputed input has no key yet. If that input turns out equal to that of an earlier run (same content,
same key), the stage is cached after all. So the plan is an upper bound, except for refills of a round, which depend on
its filter. Decisions from existing evaluations (early stopping, the best policy) are the same as in the run; if
evaluations are pending, the plan continues to the last round and says that it is an upper bound.

Times and the cost of judges come from earlier stages (`earlier_stages`). Background work (`collect.overlap`) counts
only by the time that exceeds the stage beside it, and branches that run at the same time (`compute.parallel`) by the
longest. The price of a machine-hour comes from `compute.prices`; for a SkyPilot machine without a price there, from
SkyPilot's optimizer. Files are not verified: the run detects damaged ones.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from components.artifacts import Artifact, stage_key
from components.compute.local.spec import LocalPlace
from components.compute.place import Offer, Place, offers
from components.errors import GuardTriggered
from components.rewards.llm.spec import asked_by
from components.specs import Target
from flows.execution import notification
from flows.execution.overlap import BackgroundResult, Work
from flows.execution.parallel import T, overlaps
from flows.experiment import run_models
from flows.experiment.prerequisites import lacking
from flows.experiment.prompts import check_prompts
from flows.experiment.spec import ExperimentSpec
from flows.experiment.starting_point import StartingPoint
from flows.history.records import Notice, Records, RunRecord
from flows.history.store_reader import StoreReader
from flows.planning.earlier_stages import EarlierStages, SimilarStage
from flows.planning.engines import engine_notes
from flows.planning.notes import deployment_problems, pending_decisions, process_starts, resolved_values
from flows.planning.run_plan import PlannedStage, RunPlan, total
from flows.planning.sharded import (
    PlannedShards,
    has_scratch,
    pending_share,
    planned_rows,
    planned_shards,
    wall_seconds,
    with_costs,
)
from flows.planning.training_memory import memory_notes
from flows.recipes.rehearsal import placeholder, rehearse
from flows.recipes.run import Run
from flows.stages import PLACED, STAGES
from flows.stages.base import Context, Request, StageRunner
from flows.stages.execute import check_schema, stage_and_spec


def plan(*specs: ExperimentSpec, ask: Callable[[Mapping[str, Place]], dict[str, Offer]] = offers) -> RunPlan:
    """Return the plan of one run, or of the runs of several seeds one after the other. A stage that a run shares with
    one before it is cached. ask: query the providers' offers for places without a price.

    Raises SpecError and ResourceError as the checks before a run do."""
    first = specs[0]
    earlier = Records(first.root).all()
    planner = _Planner(first, Context.at(first.root, first.store), earlier, ask)
    runs = [_plan_run(planner, spec) for spec in specs]
    common = [note for note in runs[0].notes if all(note in run.notes for run in runs)]
    notes = [f"seed {run.seeds[0]}: {note}" for run in runs for note in run.notes if note not in common]
    at_most = any(run.at_most for run in runs)
    seeds = [spec.seed for spec in specs]
    new = bool(earlier) and all(run.name != first.name for run in earlier)
    return RunPlan(first.name, first.root, planner.planned, [*common, *notes, *planner.prices()], at_most, seeds, new)


def _plan_run(planner: _Planner, spec: ExperimentSpec) -> RunPlan:
    """Add the stages of a run to the planner. Return the plan of this run, without prices."""
    first = len(planner.planned)
    planner.estimated.clear()
    spec = planner.spec = run_models.resolve(spec, planner.context.store)
    start = StartingPoint.resolve(spec, planner.context.store)
    rehearse(spec, start)
    check_prompts(spec, planner.context.cache, prepares=False)
    planner.register_start(start)
    notices: list[Notice] = []
    guard_error = None
    try:
        Run(spec, planner.call, planner.beside, start, on_notice=notices.append, at_once=planner.at_once).execute()
    except GuardTriggered as error:
        guard_error = error
    stages = planner.planned[first:]
    pending_stages = [stage for stage in stages if stage.status != "cached"]
    missing = [
        f"the run cannot start yet: {text}"
        for text in (*lacking(spec), *notification.lacking(spec), *deployment_problems(spec))
    ]
    notes = [
        *missing,
        *resolved_values(spec),
        *engine_notes(spec, planner.pending(first)),
        *process_starts(planner.estimated),
        *(memory_notes(spec, planner.context.cache) if "train" in {stage.stage for stage in pending_stages} else ()),
        *(notice.message for notice in notices if notice.kind in ("early_stopping", "best")),
    ]
    if guard_error is not None:
        notes.append(f"a guard ends the run: {guard_error}")
        return RunPlan(spec.name, spec.root, stages, notes, seeds=[spec.seed])
    waiting = {stage.label: stage.stage for stage in pending_stages}
    pending = pending_decisions(spec, waiting, {notice.kind for notice in notices})
    at_most = "end" in pending and "refills" not in pending
    return RunPlan(spec.name, spec.root, stages, [*notes, *pending.values()], at_most, [spec.seed])


class _Planner:
    """Recorder of an experiment's stages that looks each one up in the store in place of running it."""

    def __init__(
        self,
        spec: ExperimentSpec,
        context: Context,
        earlier: Sequence[RunRecord],
        ask: Callable[[Mapping[str, Place]], dict[str, Offer]],
    ):
        self.spec = spec
        self._ask = ask
        self._offers: dict[str, Offer] | None = None
        self.context = context
        self.planned: list[PlannedStage] = []
        self.estimated: list[tuple[str, bool, bool]] = []
        """Stages with an estimate: kind, and whether the earlier and the planned one have a process of their own."""
        self._store = StoreReader(context.store)
        self._earlier = EarlierStages(earlier, self._store)
        self._labels: dict[str, str] = {}
        self._requests: list[tuple[Request, Artifact]] = []
        self.beside = PlannedBackground(self.planned, self.call, self._price)

    def register_start(self, start: StartingPoint) -> None:
        """Register the artifacts that exist before the first stage, with their labels."""
        fork = start.fork
        if fork is not None:
            run = fork.run.short
            self._register(fork.checkpoint, f"{run}@{fork.step}")
            if fork.reference is not None:
                self._register(fork.reference, f"{run}@0")
            for step, checkpoint in fork.followed.items():
                self._register(checkpoint, f"{run}@{step}")
            for rounds in (fork.earlier, fork.anchored):
                for ago, artifacts in enumerate(rounds):
                    for artifact in artifacts.values():
                        self._register(artifact, f"{run} {artifact.stage}[{fork.step - ago or 'sft'}]")
        for part in start.feedback:
            for name, artifact in part.artifacts.items():
                self._register(artifact, f"annotated {name}")

    def _register(self, artifact: Artifact, label: str) -> None:
        self._store.known[artifact.key] = artifact
        self._labels[artifact.key] = label

    def _where(self, stage: str) -> str:
        """Return the name of the place and the requested resources."""
        name = self.spec.compute.placement(stage)
        machine = self.spec.compute.places[name].describe()
        return f"{name}: {machine}" if machine else name

    def _price(self, stage: str) -> float | None:
        """Return the price of an hour of the stage's machine; None if unknown."""
        compute = self.spec.compute
        price = compute.hourly_price(stage)
        name = compute.placement(stage)
        if price or compute.places[name].price_source is None:
            return price
        if self._offers is None:
            unpriced = {compute.placement(kind) for kind in PLACED if not compute.hourly_price(kind)}
            places = {place: compute.places[place] for place in sorted(unpriced)}
            self._offers = self._ask({key: place for key, place in places.items() if place.price_source is not None})
        return self._offers[name].price

    def pending(self, first: int) -> list[Request]:
        """Return the requests of the stages that are not cached, from number `first` on."""
        planned = zip(self.planned[first:], self._requests[first:], strict=True)
        return [request for stage, (request, _) in planned if stage.status != "cached"]

    def prices(self) -> Iterator[str]:
        """Yield a message with the machine and the price of each place of pending stages: the price of `compute`, else
        that of its provider."""
        compute = self.spec.compute
        kinds = list(dict.fromkeys(stage.stage for stage in self.planned if stage.status != "cached"))
        used = {compute.placement(kind) for kind in kinds}
        for kind in kinds:
            if (price := compute.hourly_price(kind)) and compute.place(kind).remote:
                yield f"{kind} on {self._where(kind)}: {price:.2f} per hour by compute.prices"
        for name, offer in (self._offers or {}).items():
            if name not in used:
                continue
            if offer.price is None:
                yield f"{name}: unknown price: {offer.problem}"
            else:
                source = offer.source or compute.places[name].price_source
                advice = "set compute.prices to count it in the run's cost"
                yield f"{name}: {offer.machine}, {offer.price:.2f} per hour by {source}; {advice}"

    def call(self, label: str, step: int, request: Request) -> Artifact:
        """Plan a stage. Return its artifact, or a placeholder if it is pending."""
        stage, spec = stage_and_spec(request)
        part = spec.key_part()
        key = self._key(request, part)
        artifact = self._store.find(key) if key else None
        if artifact is not None:
            check_schema(artifact)
        same = next((result for earlier, result in self._requests if earlier == request), None)
        artifact = artifact or same
        similar = self._earlier.similar(label, request, part)
        times = [earlier.seconds_for(request) for earlier in similar if earlier.same_model]
        seconds = statistics.median(times) if times else None
        status = "unfinished" if key and has_scratch(self.context.store, key) else "run"
        if artifact is not None:
            status, seconds = "cached", 0.0
        elif times:
            own_process = self.spec.compute.place(request.stage).name != LocalPlace().name
            self.estimated.append((request.stage, similar[0].in_own_process, own_process))
        split = PlannedShards() if artifact is not None else self._shards(label, request, seconds)
        shards = split.shards
        status = "unfinished" if any(shard.status != "run" for shard in shards) else status
        machine_seconds = seconds
        if shards and seconds is not None:
            machine_seconds = seconds * pending_share(shards)
            seconds = wall_seconds(shards, self.spec.compute)
            if not self.spec.compute.place(request.stage).own_machines:
                machine_seconds = seconds
        price = 0.0 if artifact is not None else self._price(request.stage)
        generation = 0.0 if artifact is not None else spec.generation_cost()
        judge_cost = 0.0 if artifact is not None else self._judge_cost(request, part, spec.applied_reward())
        if shards and judge_cost is not None:
            judge_cost *= pending_share(shards)
        machine_cost = None if machine_seconds is None or price is None else machine_seconds / 3600 * price
        if generation and price == 0:  # its cost is known before its time
            machine_cost = 0.0
        self.planned.append(
            PlannedStage(
                label=label,
                seed=self.spec.seed,
                stage=request.stage,
                step=step,
                inputs={name: self._labels.get(key, key[:12]) for name, key in request.inputs.items()},
                status=status,
                why=[] if artifact else self._why(request, key, status, similar[0] if similar else None),
                where=self._where(request.stage),
                seconds=seconds,
                cost=(cost := total(iter([machine_cost, judge_cost, generation]))),
                key=key,
                episodes=stage.episodes(request),
                shards=with_costs(shards, cost),
                shard_count=split.count,
                shard_count_estimated=split.estimated,
            )
        )
        if artifact is None:
            artifact = replace(placeholder(label, request.stage), key=f"{label} of seed {self.spec.seed}")
        self._labels.setdefault(artifact.key, label)
        self._requests.append((request, artifact))
        return artifact

    def _shards(self, label: str, request: Request, seconds: float | None) -> PlannedShards:
        """Return the shards of a stage that runs."""

        def status(shard: Request) -> tuple[str, str | None]:
            key = self._key(shard, stage_and_spec(shard)[1].key_part())
            if key and self._store.find(key) is not None:
                return "cached", key
            return "unfinished" if key and has_scratch(self.context.store, key) else "run", key

        rows = partial(planned_rows, request, self._store.known, self._requests, self.context)
        return planned_shards(label, request, self.spec.compute, status=status, rows=rows, seconds=seconds)

    def at_once(self, branches: Sequence[Callable[[StageRunner], T]]) -> list[T]:
        """Plan branches of which up to `compute.parallel` run at the same time."""
        compute, first = self.spec.compute, len(self.planned)
        free = [0.0] * compute.parallel
        """Time at which each lane is free."""
        spans: list[tuple[float, float]] = []
        results = []
        for branch in branches:
            lane = free.index(min(free))
            results.append(branch(self.call))
            for stage in self.planned[first + len(spans) :]:
                begin, free[lane] = free[lane], free[lane] + (stage.seconds or 0.0)
                spans.append((begin, free[lane]))
        stages = self.planned[first:]
        if all(compute.place(stage.stage).concurrent for stage in stages if stage.status != "cached"):
            lowest = min((self._price(stage.stage) or 0.0 for stage in stages), default=0.0)
            for index, (stage, overlap) in enumerate(zip(stages, overlaps(spans), strict=True), first):
                saved = 0.0 if compute.place(stage.stage).remote else overlap / 3600 * lowest
                cost = None if stage.cost is None else stage.cost - saved
                beside = stages[0].label if overlap else None
                self.planned[index] = replace(stage, beside=beside, overlapped_seconds=overlap, cost=cost)
        return results

    def _key(self, request: Request, part: dict[str, Any]) -> str | None:
        """Return the stage key of a request; None if an input is pending."""
        if not all(key in self._store.known for key in request.inputs.values()):
            return None
        stage = STAGES[request.stage]
        digests = {name: self._store.known[key].digest for name, key in request.inputs.items()}
        return stage_key(stage.name, stage.version, part, digests, request.seed)

    def _judge_cost(self, request: Request, part: Mapping[str, Any], reward: Target | None) -> float | None:
        """Return the cost of a stage's paid judges, for its own episodes or those of its inputs; None if unknown."""
        if reward is None or not any(judge.paid for judge in asked_by(reward)):
            return 0.0
        episodes = STAGES[request.stage].episodes(request)
        if episodes is None:
            sources = {self._labels.get(key) for key in request.inputs.values()}
            counts = (stage.episodes for stage in self.planned if stage.label in sources)
            episodes = next((count for count in counts if count is not None), None)
        cost = self._earlier.cost_per_episode(part["reward"])
        return None if cost is None or episodes is None else cost * episodes * self._judged_share(request)

    def _judged_share(self, request: Request) -> float:
        """Return the share of the episodes of its input that a judge stage judges: all of them, or the anchors."""
        anchors = request.spec.get("anchors")
        source = next((r for r, artifact in self._requests if artifact.key == request.inputs.get("trajectories")), None)
        if anchors is None or source is None:
            return 1.0
        return min(1.0, anchors["groups"] / source.spec["collect"]["scenarios"])

    def _why(self, request: Request, key: str | None, status: str, nearest: SimilarStage | None) -> list[str]:
        """Return the reasons why a stage is not cached."""
        if status == "unfinished":
            return ["resumes an interrupted attempt"]
        if key is not None and (run := self._earlier.run_of(key)) is not None:
            return [f"run {run.short} had it, but it is no longer in the store"]
        if nearest is None:
            return ["no similar stage has run"]
        known = self._store.known
        recomputed = {name: self._labels[key] for name, key in request.inputs.items() if key not in known}
        return nearest.reasons(request, recomputed, STAGES[request.stage].version)


PLACE = "process"
"""Place of background work."""


class PlannedBackground:
    """`BackgroundRunner` of a plan. It plans a work where the run waits for it. The work runs from the start of the
    stage beside which it is started; what it takes after the end of the stage at whose end the run waits for it counts
    in the time of the run."""

    def __init__(self, planned: list[PlannedStage], call: StageRunner, price: Callable[[str], float | None]):
        self._planned = planned
        self._call = call
        self._price = price
        """Price of an hour of a kind of stage."""
        self._pending: deque[tuple[str, float, Work]] = deque()
        """Works that the run did not wait for, with the label of the stage beside which they start, and its start."""

    @contextmanager
    def __call__(self, label: str, *works: Work) -> Iterator[BackgroundResult]:
        now = self._now()
        self._pending.extend((label, now, work) for work in works)
        result = BackgroundResult()
        yield result
        waited, first = self._now(), len(self._planned)
        beside, begin, work = self._pending.popleft()
        result.value = work(self._call)
        kind = label.partition("[")[0]
        for index, stage in enumerate(self._planned[first:], first):
            seconds = stage.seconds or 0.0
            overlap = min(seconds, max(0.0, waited - begin))
            begin += seconds
            prices = [self._price(name) or 0.0 for name in (stage.stage, kind)] if overlap else [0.0]
            cost = None if stage.cost is None else stage.cost - overlap / 3600 * min(prices)
            self._planned[index] = replace(stage, beside=beside, where=PLACE, overlapped_seconds=overlap, cost=cost)

    def close(self) -> None:
        self._pending.clear()

    def _now(self) -> float:
        """Return the time of the run up to here, in seconds."""
        return sum((stage.seconds or 0.0) - stage.overlapped_seconds for stage in self._planned)
