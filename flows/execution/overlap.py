"""Background work beside stages: with `collect.overlap=K`, rounds r + 1 to r + K are collected, judged and filtered
while round r trains.

The work of a round is a sequence of stages, run by a thread that only waits. The stages run in a worker process,
wherever `compute` places their kind, because the model in training cannot sample. Each of up to K rounds in progress
has a worker of its own, which stays alive for later rounds, with its models loaded. The queue is bounded by the caller:
it starts a round's work only after it waited for an earlier one. The main thread reports the stages of a round after
the foreground stage at whose end it waits for them, in the order of the rounds, so records, MLflow and report have a
deterministic order. Stage keys do not depend on the overlap in time: run sequentially (`Sequential`), the same schedule
produces the same artifacts.

If the foreground stage fails or the run is interrupted, all background work is stopped; finished episodes are kept. If
background work fails, the foreground stage finishes first, then the run ends with the error of the background work.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from components.compute.runners import GRACE, KeptProcessRunner
from flows.stages.base import Request, StageRunner

if TYPE_CHECKING:
    from flows.execution.executor import Execution, FinishedStage

Work = Callable[[StageRunner], Any]
"""Background work. It receives the function that runs its stages."""


class BackgroundResult:
    """Result of background work; set after the foreground stage."""

    value: Any


class BackgroundRunner(Protocol):
    """Queue of background work."""

    def __call__(self, label: str, *works: Work) -> AbstractContextManager[BackgroundResult]:
        """Start `works` beside a block that runs the stage `label`. After the block, wait for the oldest work that was
        not waited for, which may have been started beside an earlier stage, and set the result to its value."""
        ...

    def close(self) -> None:
        """Stop the work that was not waited for; finished episodes are kept."""
        ...


class Sequential:
    """`BackgroundRunner` that runs a work when it is waited for."""

    def __init__(self, call: StageRunner):
        self._call = call
        self._pending: deque[Work] = deque()

    @contextmanager
    def __call__(self, label: str, *works: Work) -> Iterator[BackgroundResult]:
        self._pending.extend(works)
        result = BackgroundResult()
        yield result
        result.value = self._pending.popleft()(self._call)

    def close(self) -> None:
        self._pending.clear()


Wrap = Callable[[Callable[[str, int, Request], "FinishedStage"]], StageRunner]
"""Function that turns a function that runs stages into a Prefect task."""


class Concurrent:
    """`BackgroundRunner` that runs works concurrently with the foreground and with each other."""

    def __init__(self, execution: Execution, wrap: Wrap):
        self._execution = execution
        self._wrap = wrap
        self._pending: deque[_RunningWork] = deque()
        self._foreground = ""
        """Label of the running foreground stage; empty between them."""

    @contextmanager
    def __call__(self, label: str, *works: Work) -> Iterator[BackgroundResult]:
        result = BackgroundResult()
        try:
            self._foreground = label
            for work in works:
                self._start(label, work)
            yield result
            self._foreground = ""
            until = time.monotonic()
            oldest = self._pending[0]
            oldest.thread.join()
        except BaseException:
            self.close()
            raise
        self._pending.popleft()
        for finished in oldest.done:
            self._execution.tell(self._execution.beside(finished, label.partition("[")[0], until))
        if (error := oldest.error or next((work.error for work in self._pending if work.error), None)) is not None:
            self.close()
            raise error
        result.value = oldest.value

    def close(self) -> None:
        self._foreground = ""
        stops = [threading.Thread(target=work.runner.stop, daemon=True) for work in self._pending]
        for stop in stops:  # at the same time: each process has some seconds to put away what it has
            stop.start()
        for stop in stops:
            stop.join()
        for work in self._pending:
            work.thread.join(GRACE)
            for finished in work.done:
                self._execution.write_down(finished)
        self._pending.clear()

    def _start(self, label: str, work: Work) -> None:
        used = {running.lane for running in self._pending}
        lane = next(number for number in range(len(used) + 1) if number not in used)
        running = _RunningWork(self._execution, lane)

        def run() -> None:
            try:
                running.value = work(self._wrap(running.stage))
            except BaseException as error:  # noqa: BLE001  the main thread raises it
                running.error = error
                if self._foreground:
                    self._execution.console.line(f"background work failed; {self._foreground} finishes first: {error}")

        context = contextvars.copy_context()  # contains Prefect's active flow
        running.thread = threading.Thread(target=context.run, args=(run,), name=f"beside {label}", daemon=True)
        self._pending.append(running)
        running.thread.start()


class _RunningWork:
    """Background work in its lane."""

    thread: threading.Thread
    value: Any = None
    error: BaseException | None = None

    def __init__(self, execution: Execution, lane: int):
        self.lane = lane
        """Number of its worker process."""
        self.runner: KeptProcessRunner = execution.background(lane)
        self.done: list[FinishedStage] = []
        self._execution = execution

    def stage(self, label: str, step: int, request: Request) -> FinishedStage:
        """Run a stage in the worker process."""
        self.done.append(self._execution.make(label, step, request, self.runner))
        return self.done[-1]
