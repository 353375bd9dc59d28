"""Background work beside a stage: round r + 1 is collected, judged and filtered while round r trains
(`collect.overlap`).

The background work is a sequence of stages, run by a thread that only waits. The stages run in a second worker process,
wherever `compute` places their kind, because the model in training cannot sample. The worker stays alive for the next
round, with its models loaded. The main thread reports the background stages after the foreground stage, once both are
done, so records, MLflow and report have a deterministic order.
Stage keys do not depend on the overlap: run sequentially (`sequential`), the same schedule produces the same artifacts.

If the foreground stage fails or the run is interrupted, the background work is stopped; finished episodes are kept. If
the background work fails, the foreground stage finishes first, then the run ends with the error of the background work.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from components.compute.runners import GRACE
from flows.experiment.requests import StageRunner
from flows.stages.base import Request

if TYPE_CHECKING:
    from flows.execution.executor import Execution, FinishedStage

T = TypeVar("T")


class BackgroundResult(Generic[T]):
    """Result of background work; set after the foreground stage."""

    value: T


class BackgroundRunner(Protocol):
    """Context manager factory: runs `work` in the background of a block that runs the stage `label`. `work` receives
    the function that runs its stages."""

    def __call__(self, label: str, work: Callable[[StageRunner], T]) -> AbstractContextManager[BackgroundResult[T]]: ...


def sequential(call: StageRunner) -> BackgroundRunner:
    """Return a `BackgroundRunner` that runs the work after the block."""

    @contextmanager
    def beside(label: str, work: Callable[[StageRunner], T]) -> Iterator[BackgroundResult[T]]:
        result: BackgroundResult[T] = BackgroundResult()
        yield result
        result.value = work(call)

    return beside


Wrap = Callable[[Callable[[str, int, Request], "FinishedStage"]], StageRunner]
"""Function that turns a function that runs stages into a Prefect task."""


def together(execution: Execution, wrap: Wrap) -> BackgroundRunner:
    """Return a `BackgroundRunner` that runs the work concurrently with the block."""

    @contextmanager
    def beside(label: str, work: Callable[[StageRunner], T]) -> Iterator[BackgroundResult[T]]:
        result: BackgroundResult[T] = BackgroundResult()
        done: list[FinishedStage] = []
        errors: list[BaseException] = []

        def stage(label: str, step: int, request: Request) -> FinishedStage:
            done.append(execution.make(label, step, request, execution.second))
            return done[-1]

        def run() -> None:
            try:
                result.value = work(wrap(stage))
            except BaseException as error:  # noqa: BLE001  the main thread raises it
                errors.append(error)
                if not over.is_set():
                    execution.console.line(f"background work failed; {label} finishes first: {error}")

        over = threading.Event()
        context = contextvars.copy_context()  # contains Prefect's active flow
        thread = threading.Thread(target=context.run, args=(run,), name=f"beside {label}", daemon=True)
        thread.start()
        try:
            yield result
            over.set()
            until = time.monotonic()
            thread.join()
        except BaseException:
            over.set()
            execution.second.stop()
            thread.join(GRACE)
            for finished in done:
                execution.write_down(finished)
            raise
        for finished in done:
            execution.tell(execution.beside(finished, label.partition("[")[0], until))
        if errors:
            raise errors[0]

    return beside
