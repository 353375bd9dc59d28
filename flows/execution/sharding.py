"""Shards of one stage, run at the same time where `compute` places the stage, and their join.

Each shard is a stage of its own (`flows.stages.shard`): a finished one is cached. Up to `compute.shard_workers` threads
only wait for the runners, each with machines or processes of its own. If a shard dies, it alone is retried
(`compute.retries`), and the others finish; then the stage ends with its first error. The same command computes the
shards that are missing. With `compute.duplicate_after`, an idle worker computes a copy of a straggler; both have the
same content, so the first one counts. An error that a retry cannot mend, such as an invalid configuration, stops the
others.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from components.artifacts import Artifact, Store
from components.compute.runners import GRACE, Event, Runner, RunnerStopped, StoppableRunner
from components.compute.spec import ComputeSpec
from components.errors import EngineError, EnvironmentFailed, EspalierError, TooManyFailures
from components.json_text import read_json
from flows.stages import STAGES
from flows.stages.base import Context, Request, StagePart
from flows.stages.execute import find_stage, resolve, stage_and_spec
from flows.stages.shard import joined, shard_request

if TYPE_CHECKING:
    from flows.execution.executor import Execution

logger = logging.getLogger(__name__)

POLL = 0.2
"""Seconds between two looks at the workers."""


def shard_count(compute: ComputeSpec, request: Request, rows: Callable[[], int | None]) -> int | None:
    """Return the number of shards of a stage: 1 if it runs as a whole, None if it depends on unknown rows. rows:
    function that counts the rows of the request, which is called if `compute.shard_rows` divides them. Raises
    SpecError for an invalid request."""
    sharding = STAGES[request.stage].sharding
    count = compute.shards_of(request.stage)
    if sharding is None or count == 1 or sharding.refusal(stage_and_spec(request)[1]):
        return 1
    if count is not None:
        return count
    return None if (number := rows()) is None else compute.shards_for(number)


def count_rows(request: Request, context: Context) -> int:
    """Return the number of rows of a stage that can be split; its inputs must be in the store."""
    stage, spec, inputs, _ = resolve(request, context)
    assert stage.sharding is not None, request.stage
    rows = stage.sharding.rows(spec, inputs, context)
    assert rows is not None, f"{request.stage}: all inputs are there"
    return rows


def is_transient(error: object) -> bool:
    """Return True if a retry may succeed: the process died without an error, or an engine or environment failed."""
    return type(error) is EspalierError or isinstance(error, EngineError | EnvironmentFailed)


class ShardedStage:
    """One stage that is computed as `count` shards. listen: receives the events of the whole stage."""

    def __init__(self, execution: Execution, label: str, request: Request, count: int, listen: Callable[[Event], None]):
        self._execution = execution
        self._label = label
        self._request = request
        self._listen = listen
        self._compute = execution.spec.compute
        self._count = count
        self._artifacts: dict[int, Artifact] = {}
        self._pending: list[int] = []
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._progress: dict[int, tuple[int, int]] = {}
        self._errors: list[BaseException] = []
        self._working: dict[int, _Work] = {}
        """Shards at work, by lane."""
        self._copied: set[int] = set()
        """Shards of which a copy was started."""
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._seconds: list[float] = []
        """Times of the finished shards."""
        self._paid = 0.0

    @property
    def machine_seconds(self) -> float | None:
        """Seconds of all machines, which are paid for; None if the shards share this machine."""
        return self._paid if self._compute.place(self._request.stage).own_machines else None

    def run(self) -> Artifact:
        """Compute the shards that are not cached, and return the joined artifact. Raise the first error."""
        context = self._execution.context
        for index in range(self._count):
            copies = [shard_request(self._request, StagePart(index, self._count), copy) for copy in (0, 1)]
            cached = (artifact for request in copies if (artifact := find_stage(request, context)) is not None)
            if (artifact := next(cached, None)) is not None:
                self._artifacts[index] = artifact
            else:
                self._pending.append(index)
        self._execution.console.line(self._progress_line())
        self._work_all()
        if self._errors:
            raise self._errors[0]
        shards = [self._artifacts[index] for index in range(self._count)]
        try:
            return joined(self._request, shards, context)
        except TooManyFailures as error:
            forget_failures(shards, context.store, str(error))
            raise

    def _progress_line(self) -> str:
        """Return a line on the number of shards, their place, how many run at a time and how many are cached."""
        name, pending = self._compute.placement(self._request.stage), len(self._pending)
        cached = f", {self._count - pending} of them cached" if self._artifacts else ""
        workers = self._compute.workers(pending) if pending else 0
        together = f", {workers} at a time" if workers < pending else ""
        return f"  {self._label}: {self._count} shards on {name}{cached}{together}"

    def _work_all(self) -> None:
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,  # contains Prefect's active flow
                args=(self._work, lane),
                name=f"{self._label} worker {lane + 1}",
                daemon=True,
            )
            for lane in range(self._compute.workers(len(self._pending)))
        ]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                self._report()
        except BaseException:
            self._stop()
            for thread in threads:
                thread.join(GRACE)
            raise
        while not self._events.empty():
            self._report()

    def _report(self) -> None:
        """Pass on one event, with the progress of all shards."""
        try:
            index, event = self._events.get(timeout=POLL)
        except queue.Empty:
            return
        if "progress" in event:
            done, total, values = event["progress"]
            self._progress[index] = done, total
            done, total = (sum(numbers) for numbers in zip(*self._progress.values(), strict=True))
            event = {"progress": [done, total, values]}
        self._listen(event)

    def _work(self, lane: int) -> None:
        """Compute pending shards, one after the other, then copies of stragglers. lane: number of the worker, which has
        a runner of its own."""
        try:
            while (index := self._next()) is not None:
                self._attempt(lane, index)
            while (index := self._straggler()) is not None:
                self._attempt(lane, index, copy=1)
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            self._errors.append(error)
            self._stop()

    def _next(self) -> int | None:
        with self._lock:
            return self._pending.pop(0) if self._pending and not self._stopped.is_set() else None

    def _straggler(self) -> int | None:
        """Wait for a shard that takes too long and has no copy; None when none runs any more."""
        factor = self._compute.duplicate_after
        while factor and not self._stopped.wait(POLL):
            with self._lock:
                alone = [work for work in self._working.values() if work.index not in self._copied]
                if not alone:
                    return None
                now = time.monotonic()
                late = [work for work in alone if self._seconds and now - work.start > factor * median(self._seconds)]
                if late:
                    slowest = min(late, key=lambda work: work.start)
                    self._copied.add(slowest.index)
                    logger.info("%s: a copy of %s starts", self._label, self._name(slowest.index))
                    return slowest.index
        return None

    def _attempt(self, lane: int, index: int, copy: int = 0) -> None:
        """Compute one shard, with retries. Record a transient error; raise any other."""
        remaining = self._compute.retries
        while index not in self._artifacts:
            try:
                self._finish(index, self._compute_shard(lane, index, copy), lane)
            except RunnerStopped:  # by `_stop`, or because another copy was faster
                if self._stopped.is_set():
                    raise
            except EspalierError as error:
                if not is_transient(error):
                    raise
                name = f"{self._label} {self._name(index)}"
                logger.warning("%s failed, %d retries left: %s", name, remaining, error)
                if not remaining:
                    self._errors.append(type(error)(f"{name}: {error}"))
                    return
                remaining -= 1
                if self._stopped.wait(self._compute.retry_delay):
                    raise RunnerStopped from None

    def _finish(self, index: int, artifact: Artifact, lane: int) -> None:
        """Set the artifact of a shard, and stop the other copies of it."""
        with self._lock:
            self._artifacts.setdefault(index, artifact)
            others = {other: work for other, work in self._working.items() if work.index == index and other != lane}
        self._stop_lanes(others)

    def _compute_shard(self, lane: int, index: int, copy: int) -> Artifact:
        execution = self._execution
        request = shard_request(self._request, StagePart(index, self._count), copy)
        runner = execution.runner(self._request.stage, lane)
        with self._lock:
            if self._stopped.is_set():
                raise RunnerStopped
            work = self._working[lane] = _Work(index, runner, time.monotonic())
        try:
            result = runner.run(request.to_json(), lambda event: self._events.put((index, event)))
        finally:
            self._working.pop(lane, None)
            self._paid += time.monotonic() - work.start
        self._seconds.append(time.monotonic() - work.start)
        artifact = execution.context.store.find(result.key)
        assert artifact is not None, f"{self._label}: {result.key} is not in {execution.context.store}"
        return artifact

    def _name(self, index: int) -> str:
        return str(StagePart(index, self._count))

    def _stop(self) -> None:
        """Start no more shards, and stop the running ones."""
        with self._lock:
            self._stopped.set()
            running = dict(self._working)
        self._stop_lanes(running)

    def _stop_lanes(self, lanes: Mapping[int, _Work]) -> None:
        for lane, work in lanes.items():
            if isinstance(work.runner, StoppableRunner):
                work.runner.stop()
            self._execution.drop_runner(self._request.stage, lane)


@dataclass(frozen=True)
class _Work:
    """Shard that a worker computes."""

    index: int
    runner: Runner
    start: float


def forget_failures(shards: Sequence[Artifact], store: Store, reason: str) -> None:
    """Remove the artifacts of shards with failed episodes; their finished episodes stay for the next attempt."""
    from components.trajectories.store import read_trajectories
    from flows.stages.episodes import FinishedEpisodes

    for shard in shards:
        trajectories = list(read_trajectories(shard.path / "trajectories.parquet"))
        if all(trajectory.failure is None for trajectory in trajectories):
            continue
        seconds = read_json(shard.path / "times.json")
        episodes = FinishedEpisodes(store.scratch(shard.key))
        for trajectory in trajectories:
            if trajectory.failure is None:
                episodes.add(trajectory, seconds.get(trajectory.id, 0.0))
        episodes.flush()
        store.discard(shard.key, reason)
