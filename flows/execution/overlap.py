"""Work beside a stage: while round r is trained, round r + 1 is collected, judged and filtered (`collect.overlap`).

The work is a line of stages of its own, in a thread that only waits: they run in a second process, wherever `compute`
places their kind, for the model in training cannot sample meanwhile. It stays for the next round, with its models
loaded. What became of them is told by the main thread once both are done, the stage first: records, MLflow and report
have one order, whichever ended first.
Keys know nothing of it: played one after the other (`one_by_one`), the same schedule makes the same artifacts.

Where the stage fails or the run is interrupted, the work is ended; episodes that had finished are kept. Where the work
fails, the stage is let end first, for it is worth something; then the run ends with the error of the work.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from components.compute.runners import GRACE
from flows.experiment.requests import Call
from flows.stages.base import Request

if TYPE_CHECKING:
    from flows.execution.executor import Done, Execution

Found = TypeVar("Found")


class Ahead(Generic[Found]):
    """What the work came to, once the stage that it was done beside is over."""

    found: Found


class Beside(Protocol):
    """Does work beside a block that runs the stage `label`; the work is given what runs its stages."""

    def __call__(self, label: str, work: Callable[[Call], Found]) -> AbstractContextManager[Ahead[Found]]: ...


def one_by_one(call: Call) -> Beside:
    """Does the work after the block."""

    @contextmanager
    def beside(label: str, work: Callable[[Call], Found]) -> Iterator[Ahead[Found]]:
        ahead: Ahead[Found] = Ahead()
        yield ahead
        ahead.found = work(call)

    return beside


Wrap = Callable[[Callable[[str, int, Request], "Done"]], Call]
"""Makes a function that runs stages what Prefect knows."""


def together(execution: Execution, wrap: Wrap) -> Beside:
    """Does the work at the same time as the block."""

    @contextmanager
    def beside(label: str, work: Callable[[Call], Found]) -> Iterator[Ahead[Found]]:
        ahead: Ahead[Found] = Ahead()
        done: list[Done] = []
        failed: list[BaseException] = []

        def stage(label: str, step: int, request: Request) -> Done:
            done.append(execution.make(label, step, request, execution.second))
            return done[-1]

        def run() -> None:
            try:
                ahead.found = work(wrap(stage))
            except BaseException as error:  # noqa: BLE001  raised by the main thread
                failed.append(error)
                if not over.is_set():
                    execution.console.line(f"failed beside {label}, which is let end first: {error}")

        over = threading.Event()
        context = contextvars.copy_context()  # Prefect's: the flow that is active
        thread = threading.Thread(target=context.run, args=(run,), name=f"beside {label}", daemon=True)
        thread.start()
        try:
            yield ahead
            over.set()
            until = time.monotonic()
            thread.join()
        except BaseException:
            over.set()
            execution.second.stop()
            thread.join(GRACE)
            for one in done:
                execution.write_down(one)
            raise
        for one in done:
            execution.tell(execution.beside(one, label.partition("[")[0], until))
        if failed:
            raise failed[0]

    return beside
