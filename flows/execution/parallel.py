"""Independent branches of a recipe, run at the same time (`Run.parallel`): reward models of an ensemble, collections in
several environments.

A branch is a sequence of stages. Up to `compute.parallel` branches run at once, each in a thread that only waits: their
stages run in processes of their own, wherever `compute` places them. Stages of the place `local` run in the main
thread, one after the other, because they share its models and cores. The main thread reports the stages once all
branches are done, in the order of the branches, so records, MLflow and report do not depend on the order of completion.

If a branch fails or the run is interrupted, the other branches are stopped; finished episodes are kept. If a branch
reaches the budget, their running stages finish, because they are paid for. The run ends with the first error.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from components.compute.runners import GRACE, ProcessRunner, RunnerStopped
from components.errors import BudgetReached
from flows.execution.overlap import Wrap
from flows.stages.base import Request, StageRunner

if TYPE_CHECKING:
    from flows.execution.executor import Execution, FinishedStage

T = TypeVar("T")

POLL = 0.5
"""Seconds between two looks for an interruption."""


class ParallelRunner(Protocol):
    """Function that runs independent branches and returns their results in order. Each branch receives the function
    that runs its stages."""

    def __call__(self, branches: Sequence[Callable[[StageRunner], T]]) -> list[T]: ...


def in_turn(call: StageRunner) -> ParallelRunner:
    """Return a `ParallelRunner` that runs the branches one after the other."""

    def run(branches: Sequence[Callable[[StageRunner], T]]) -> list[T]:
        return [branch(call) for branch in branches]

    return run


def at_once(execution: Execution, wrap: Wrap) -> ParallelRunner:
    """Return a `ParallelRunner` that runs up to `compute.parallel` branches at the same time."""

    def run(branches: Sequence[Callable[[StageRunner], T]]) -> list[T]:
        if min(execution.spec.compute.parallel, len(branches)) < 2:
            return in_turn(wrap(execution.stage))(branches)
        return _Branches(execution, wrap, branches).run()

    return run


def overlaps(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return the seconds of each span (start, end) that the spans before it in the sequence cover."""
    covered = []
    for index, (start, end) in enumerate(spans):
        total, reached = 0.0, start
        for first, last in sorted(spans[:index]):
            last = min(last, end)
            total += max(0.0, last - max(first, reached))
            reached = max(reached, last)
        covered.append(total)
    return covered


class _Branches(Generic[T]):
    """Branches that run at the same time."""

    def __init__(self, execution: Execution, wrap: Wrap, branches: Sequence[Callable[[StageRunner], T]]):
        self._execution = execution
        self._wrap = wrap
        self._results: dict[int, T] = {}
        self._done: list[list[FinishedStage]] = [[] for _ in branches]
        """Finished stages of each branch."""
        self._errors: list[BaseException] = []
        self._pending = list(enumerate(branches))
        self._local: queue.SimpleQueue[tuple[futures.Future[FinishedStage], Callable[[], FinishedStage]]]
        self._local = queue.SimpleQueue()
        """Stages for the main thread."""
        self._runners: set[ProcessRunner] = set()
        self._stopped = False
        self._lock = threading.Lock()
        """Guards the list of pending branches, and the start of stages against `_stop`."""

    def run(self) -> list[T]:
        """Run all branches and return their results. Raise the first error."""
        branches = len(self._done)
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,  # contains Prefect's active flow
                args=(self._work, lane),
                name=f"branch {lane}",
                daemon=True,
            )
            for lane in range(min(self._execution.spec.compute.parallel, branches))
        ]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                self._run_local()
        except BaseException:
            self._stop()
            for thread in threads:
                thread.join(GRACE)
            self._write_down()
            raise
        if self._errors:
            self._write_down()
            raise self._errors[0]
        self._report()
        return [self._results[number] for number in range(branches)]

    def _work(self, lane: int) -> None:
        """Run pending branches, one after the other. lane: number of the thread, which has runners of its own."""
        try:
            while (pending := self._next()) is not None:
                number, branch = pending
                self._results[number] = branch(self._wrap(partial(self._stage, lane, number)))
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            self._errors.append(error)
            self._stop(running=not isinstance(error, BudgetReached))

    def _next(self) -> tuple[int, Callable[[StageRunner], T]] | None:
        with self._lock:
            return None if self._stopped or not self._pending else self._pending.pop(0)

    def _stage(self, lane: int, number: int, label: str, step: int, request: Request) -> FinishedStage:
        """Run one stage of a branch in its lane, or in the main thread."""
        with self._lock:
            if self._stopped:
                raise RunnerStopped
            runner = self._execution.runner(request.stage, lane)
            if isinstance(runner, ProcessRunner):
                self._runners.add(runner)
        if isinstance(runner, ProcessRunner):
            done = self._execution.make(label, step, request, runner)
        else:
            done = self._in_main_thread(partial(self._execution.make, label, step, request))
        self._done[number].append(done)
        self._execution.unreported[label] = done
        return done

    def _in_main_thread(self, stage: Callable[[], FinishedStage]) -> FinishedStage:
        future: futures.Future[FinishedStage] = futures.Future()
        self._local.put((future, stage))
        while not futures.wait([future], POLL).done:
            if self._stopped and future.cancel():
                raise RunnerStopped
        return future.result()

    def _run_local(self) -> None:
        """Run a stage that waits for the main thread, if there is one soon. Raise only interruptions."""
        try:
            future, stage = self._local.get(timeout=POLL / 10)  # without a timeout it would block Ctrl-C
        except queue.Empty:
            return
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(stage())
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _stop(self, *, running: bool = True) -> None:
        """Start no more stages, and stop the running ones. running: False lets them finish."""
        with self._lock:
            self._stopped = True
        for runner in self._runners if running else ():
            runner.stop()

    def _write_down(self) -> None:
        for branch in self._done:
            for done in branch:
                self._execution.write_down(done)

    def _report(self) -> None:
        """Report the stages in the order of the branches, with the time for which the run did not wait. Stages on one
        machine at the same time pay for it once, at the higher price."""
        stages = [done for branch in self._done for done in branch]
        compute = self._execution.spec.compute
        lowest = min((compute.hourly_price(done.artifact.stage) for done in stages), default=0.0)
        seconds = overlaps([(done.ended - done.seconds, done.ended) for done in stages])
        for done, overlap in zip(stages, seconds, strict=True):
            shared = done.status != "cached" and not compute.place(done.artifact.stage).remote
            saved = overlap / 3600 * lowest if shared else 0.0
            self._execution.tell(replace(done, overlapped_seconds=overlap, cost=done.cost - saved))
