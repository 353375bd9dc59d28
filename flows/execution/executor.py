"""Execution of a run's stages: placement, results, and reports to the console, the record and MLflow.

`Execution.stage` is a plain function from a request to an artifact. Prefect wraps it (`flows.orchestration.tasks`); a
benchmark or a notebook calls it directly.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact
from components.compute.runners import (
    Event,
    KeptProcessRunner,
    ProcessRunner,
    Runner,
    RunnerContext,
    StageProcess,
    StageResult,
    on_own_gpu,
)
from components.compute.snapshot import RECORD, Snapshot
from components.compute.watchdog import Watchdog, watch
from components.rollout.usage import PROVIDER_COST
from components.specs.code import code_digest
from flows.execution import prefect_credential
from flows.execution.labels import is_part_of_round, metric_group
from flows.execution.notification import Notifier
from flows.execution.sharding import ShardedStage, count_rows, shard_count
from flows.experiment.guards import RULES
from flows.experiment.spec import ExperimentSpec
from flows.history.code import CodeRecords
from flows.history.lineage_graph import Lineage
from flows.history.records import Notice, RecordWriter, StageRecord
from flows.stages import DISTRIBUTED, STAGES, episode_failures
from flows.stages.anchors import drift_metrics
from flows.stages.base import Context, Progress, Request
from flows.stages.code import stage_code
from flows.stages.execute import find_stage, run_stage, stage_and_spec
from flows.stages.servers import with_server_urls
from flows.terminal.arguments import CODE
from flows.terminal.console import Console, duration

if TYPE_CHECKING:
    from components.compute.cluster import Submit
    from components.tracking.mlflow_tracker import Tracker

logger = logging.getLogger(__name__)

Watcher = Callable[[str, str], AbstractContextManager[Progress]]
"""Progress display for one stage, created from its label and its unit."""


@dataclass(frozen=True)
class FinishedStage:
    """Finished stage of this run."""

    label: str
    """Name in the run, such as `train[3]`."""
    step: int
    """Round to which the stage belongs."""
    artifact: Artifact
    status: str
    """`ran` or `cached`."""
    seconds: float
    """Time that the stage took in this run."""
    request: Request
    ended: float
    """End by the monotonic clock, in seconds."""
    cost: float = 0.0
    """Cost of judges and machine in this run; 0 if cached."""
    unpriced: int = 0
    """Number of judge calls in this run without a known price, which the cost excludes."""
    overlapped_seconds: float = 0.0
    """Seconds that overlap with another stage, for which the run did not wait."""

    @property
    def waited(self) -> float:
        """Seconds that the run waited for the stage."""
        return self.seconds - self.overlapped_seconds

    def reference(self) -> dict[str, Any]:
        """Return the JSON data that passes through Prefect."""
        artifact = self.artifact
        return {
            "status": self.status,
            "kind": artifact.kind,
            "key": artifact.key,
            "digest": artifact.digest,
            "uri": artifact.path.as_uri(),
        }


class Execution:
    """Executor of the stages of one run. Without a `tracker` nothing is tracked, without a `record` nothing is
    recorded."""

    def __init__(
        self,
        spec: ExperimentSpec,
        context: Context,
        console: Console,
        tracker: Tracker | None,
        log: Path,
        record: RecordWriter | None = None,
        submit: Submit | None = None,
    ):
        self.spec = spec
        self.context = context
        self.console = console
        self.tracker = tracker
        self.record = record
        self.lineage = Lineage(record.records.root) if record is not None else None
        self.done: dict[str, FinishedStage] = {}
        """Finished stages by label, in order."""
        self.unreported: dict[str, FinishedStage] = {}
        """Finished stages of branches that run at the same time, by label, until they are reported."""
        self.notices: list[Notice] = []
        self.notifier = None if record is None else Notifier(spec, record.run)
        """Notifier of the run; None without a record."""
        self.watchers: list[Watcher] = []
        """Progress displays besides the console."""
        process = StageProcess(
            Path(spec.root),
            log.with_suffix(".stages.log"),
            environment(),
            [*(["--store", spec.store] if spec.store else []), "--lock-timeout", str(spec.compute.lock_timeout)],
            spec.compute.stage_timeout,
            distributed=DISTRIBUTED,
        )
        self._runner_context = RunnerContext(
            run=record.run.short if record is not None else str(os.getpid()),
            log=log,
            process=process,
            execute=self._run_here,
            code=CODE,
            packages=spec.allow,
            say=console.line,
            submit=submit,
        )
        self._runners: dict[str, Runner] = {}
        """Runners by place and lane; a runner may keep its machines between stages."""
        self._codes: set[str] = set()
        self._machine_seconds: dict[str, float] = {}
        """Seconds of the machines of a stage whose shards have one each, by label."""
        self.second = KeptProcessRunner(on_own_gpu(process, 1))  # this process computes on the first
        """Runner of background work: a separate process whose models stay loaded between rounds."""
        self._background: dict[int, KeptProcessRunner] = {}

    def stage(self, label: str, step: int, request: Request) -> FinishedStage:
        """Run the stage where `compute` places it, or load it from the cache, and report it."""
        done = self.make(label, step, request)
        self.tell(done)
        return done

    def artifact(self, label: str, step: int, request: Request) -> Artifact:
        """Return the artifact of `stage`."""
        return self.stage(label, step, request).artifact

    def make(self, label: str, step: int, request: Request, beside: ProcessRunner | None = None) -> FinishedStage:
        """Run the stage where `compute` places it, or load it from the cache, without reporting it.

        beside: runner of background work or of a branch, in place of `compute`. A background thread may call this
        method: it uses only the console and the log, which are thread-safe."""
        start = time.monotonic()
        artifact, status = self._artifact(label, request, beside)
        ended = time.monotonic()
        logger.info("%s %s in %s: %s %s", label, status, duration(ended - start), artifact.kind, artifact.key)
        cost = self._cost(artifact, status, self._machine_seconds.pop(label, ended - start))
        unpriced = 0 if status == "cached" else int(artifact.metrics.get("unpriced_calls", 0))
        return FinishedStage(label, step, artifact, status, ended - start, request, ended, cost, unpriced)

    def beside(self, done: FinishedStage, other: str, until: float) -> FinishedStage:
        """Return a background stage with its overlap and its reduced cost. other: kind of the stage beside it. until:
        end of that stage. The overlap is paid once, at the higher price."""
        overlap = min(done.seconds, max(0.0, until - (done.ended - done.seconds)))
        compute = self.spec.compute
        prices = [compute.hourly_price(kind) for kind in (done.artifact.stage, other)]
        saved = 0.0 if done.status == "cached" else overlap / 3600 * min(prices)
        return replace(done, overlapped_seconds=overlap, cost=done.cost - saved)

    def tell(self, done: FinishedStage) -> None:
        """Report a finished stage to the record, MLflow and the console."""
        self.write_down(done)
        self._track(done)
        if not is_part_of_round(done.label):  # the line of the round summarizes these
            line = f"{done.label} {done.status} in {duration(done.seconds)}"
            figures = STAGES[done.artifact.stage].summary(done.artifact.metrics)
            self.console.line(f"{line}  {figures}" if figures else line)
        for line in episode_failures.lines(done.label, done.artifact):
            self.console.line(line)

    def write_down(self, done: FinishedStage) -> None:
        """Add a finished stage to the record of the run."""
        self.done[done.label] = done
        self.unreported.pop(done.label, None)
        if self.record is not None and self.lineage is not None:
            stage = _recorded(done)
            self._record_code(done, self.record.records.root)
            self.record.add(stage)
            self.lineage.add(self.record.run, stage)

    def _record_code(self, done: FinishedStage, root: Path) -> None:
        """Store the digests of the modules that computed an artifact, unless other code than the present did."""
        if done.artifact.code:
            modules = stage_code(*stage_and_spec(done.request))
            if code_digest(modules) == done.artifact.code:
                CodeRecords(root).add(modules)

    def notice(self, notice: Notice) -> None:
        """Report a notice to the console, the log, the record and MLflow (a tag with the message, and the metric
        `notice/<kind>` = 1 at the step)."""
        self.notices.append(notice)
        guard = notice.kind in RULES
        self.console.line(f"warning: {notice.message}" if guard else notice.message)
        logger.info("%s at step %d: %s", notice.kind, notice.step, notice.message)
        if self.record is not None:
            self.record.note(notice)
        if self.tracker is not None:
            tracker = self.tracker
            tracker.outbox.put(lambda: tracker.set_tags({f"notice.{notice.kind}": notice.message}))
            tracker.outbox.put(lambda: tracker.log_metrics({f"notice/{notice.kind}": 1.0}, notice.step))
        if self.notifier is not None and (guard or notice.kind == "budget"):
            self.notifier.send("guard" if guard else "budget", notice.message, notice.step)

    def _artifact(self, label: str, request: Request, beside: ProcessRunner | None) -> tuple[Artifact, str]:
        if (cached := find_stage(request, self.context)) is not None:
            return cached, "cached"
        place = self.spec.compute.placement(request.stage)
        runner = beside or self.runner(request.stage)
        limit = self.spec.compute.stall_timeout
        report = functools.partial(logger.error, "%s has stalled:\n%s", label)
        unit = STAGES[request.stage].unit
        with (
            ExitStack() as stack,
            self.console.stage(label, unit) as view,
            watch(label, limit, report, beside.stop if beside else None) as dog,
        ):
            views = [view, *(stack.enter_context(watcher(label, unit)) for watcher in self.watchers)]
            listen = _listener(views, self.console, dog)
            if runner.shares_servers:
                request = with_server_urls(
                    request, replace(self.context, on_wait=lambda text: listen({"waiting": text}))
                )
            if (shards := shard_count(self.spec.compute, request, lambda: count_rows(request, self.context)) or 1) > 1:
                sharded = ShardedStage(self, label, request, shards, listen)
                artifact = sharded.run()
                if sharded.machine_seconds is not None:
                    self._machine_seconds[label] = sharded.machine_seconds
                if runner.snapshot is not None:
                    self._report_code(place, runner.snapshot)
                return artifact, "ran"
            result = runner.run(request.to_json(), listen)
        if runner.snapshot is not None:
            self._report_code(place, runner.snapshot)
        stored = self.context.store.find(result.key)
        assert stored is not None, f"{label}: {result.key} is not in {self.context.store}"
        return stored, result.status

    def close(self, wait: float = 1.0) -> None:
        """End the worker processes and take down the machines. wait: maximum time for this, in seconds."""
        for worker in (self.second, *self._background.values()):
            worker.close()
        for runner in self._runners.values():
            runner.close(wait)

    def background(self, lane: int) -> KeptProcessRunner:
        """Return the runner of background work in a lane; works in progress at the same time have different lanes."""
        runner = self._background.get(lane, self.second)
        if runner.stopped or (lane and runner is self.second):
            runner = self.second.another(1 + lane)
        self._background[lane] = runner
        return runner

    def runner(self, stage: str, lane: int = 0) -> Runner:
        """Return the runner of a kind of stage where `compute` places it. lane: number of a thread whose stages run
        beside those of the others, on machines of their own."""
        place = self.spec.compute.placement(stage)
        name = _lane_name(place, lane)
        if name not in self._runners:
            context = replace(self._runner_context, lane=lane)
            self._runners[name] = self.spec.compute.places[place].runner(name, context)
        return self._runners[name]

    def drop_runner(self, stage: str, lane: int) -> None:
        """Close the runner of a lane, which was stopped; `runner` starts another."""
        if (runner := self._runners.pop(_lane_name(self.spec.compute.placement(stage), lane), None)) is not None:
            runner.close()

    def _report_code(self, place: str, code: Snapshot) -> None:
        """Report the version of the code that ran on a place to the log and MLflow, once per version."""
        if code.digest in self._codes:
            return
        self._codes.add(code.digest)
        changes = f", {len(code.changed)} files changed" if code.changed else ""
        logger.info("code on %s: %s (commit %s%s)", place, code.digest, code.commit or "none", changes)
        if self.tracker is not None:
            tracker = self.tracker
            tags = {"code.digest": code.digest, "code.changed": str(len(code.changed))}
            tracker.outbox.put(lambda: tracker.set_tags(tags))
            tracker.outbox.put(lambda: tracker.log_file(code.path / RECORD, "code"))

    def _track(self, done: FinishedStage) -> None:
        if self.tracker is None:
            return
        tracker, group, artifact = self.tracker, metric_group(done.label), done.artifact
        tracking = STAGES[artifact.stage].tracking
        costs = {f"{group}cost/{artifact.stage}": done.cost}
        tags = self.lineage.tags(artifact.key) if self.lineage and tracking.model else None
        put = tracker.outbox.put
        put(
            lambda: tracker.log_stage(artifact, done.label, done.status, done.seconds, done.step, tags, group, tracking)
        )
        put(lambda: tracker.log_metrics(costs, done.step))
        if drift := drift_metrics(artifact.metrics):
            values = {f"judge_drift/{name}": value for name, value in drift.items()}
            put(lambda: tracker.log_metrics(values, done.step))
        if tracking.traces:
            from components.tracking.traces import sample
            from components.trajectories.stored import StoredTrajectories

            stored = StoredTrajectories(artifact.path)
            episodes = sample(stored, tracker.traces)
            scores = {episode.id: stored.scores[episode.id] for episode in episodes}
            put(lambda: tracker.log_trajectories(episodes, done.label, scores))

    def _cost(self, artifact: Artifact, status: str, seconds: float) -> float:
        if status == "cached":
            return 0.0
        price = self.spec.compute.hourly_price(artifact.stage)
        spent = artifact.metrics.get("spent", artifact.metrics.get("cost", 0.0))
        return spent + artifact.metrics.get(PROVIDER_COST, 0.0) + seconds / 3600 * price

    def _run_here(self, request: Mapping[str, Any], on_event: Callable[[Event], None]) -> StageResult:
        def progress(done: int, total: int, values: Mapping[str, float] | None = None) -> None:
            on_event({"progress": [done, total, values]})

        def on_wait(text: str) -> None:
            on_event({"waiting": text})

        context = replace(self.context, progress=progress, on_wait=on_wait)
        artifact, status = run_stage(Request.from_json(request), context)
        return StageResult(artifact.key, artifact.digest, status)


def _lane_name(place: str, lane: int) -> str:
    return f"{place}-{lane + 1}" if lane else place


def _recorded(done: FinishedStage) -> StageRecord:
    artifact = done.artifact
    return StageRecord(
        label=done.label,
        step=done.step,
        request=done.request.to_json(),
        version=STAGES[artifact.stage].version,
        key=artifact.key,
        digest=artifact.digest,
        kind=artifact.kind,
        status=done.status,
        seconds=round(done.seconds, 3),
        cost=done.cost,
        overlapped_seconds=round(done.overlapped_seconds, 3),
        code=artifact.code,
    )


def _listener(views: Sequence[Progress], console: Console, dog: Watchdog) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if "progress" in event:
            dog.touch()
            for view in views:
                view(*event["progress"])
        elif "alive" in event:
            dog.pause()  # its place has a limit of its own
        elif "waiting" in event:
            dog.pause()
            console.line(f"  {event['waiting']}")

    return listen


def environment() -> dict[str, str]:
    """Return the environment variables of stage processes, which must import our code and the user's packages from any
    working directory. Stages do not use Prefect, so they get no credential of its server."""
    path = [str(CODE), *(entry for entry in sys.path if entry), os.getcwd()]
    inherited = {name: value for name, value in os.environ.items() if name not in prefect_credential.VARIABLES}
    return {**inherited, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}
