"""Run of a loop: its record, its MLflow run and its stages, from the first stage until `close`.

Stages run one at a time in a thread of their own, so that the rollouts have the event loop of the program.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from components.artifacts import Artifact
from components.rollout.program import PROGRAM, RolloutProgram
from flows.experiment.early_stopping import EvaluatedPolicy
from flows.experiment.spec import ExperimentSpec
from flows.recipes.outcome import RunOutcome
from flows.stages.base import Context, Request

if TYPE_CHECKING:
    from flows.execution.executor import Execution
    from flows.reporting.results import Results

T = TypeVar("T")

FINAL = "final"


class LoopRun:
    """Run of a loop. Opened by its first stage."""

    def __init__(self, spec: ExperimentSpec, context: Context, overrides: Sequence[str]):
        self.spec = spec
        self.context = context
        self.outcome = RunOutcome(begin=0)
        self._overrides = list(overrides)
        self._threads = ThreadPoolExecutor(1, "loop")
        self._services: ExitStack | None = None
        self._execution: Execution | None = None
        self._evaluated: tuple[int, Request] | None = None
        """Step and request of the last evaluation."""
        self._requests: dict[str, Request] = {}
        """Requests of evaluations by name."""
        self._started = 0.0

    async def do(self, work: Callable[[], T], program: RolloutProgram | None = None) -> T:
        """Return the result of `work`, called in the thread of the stages. program: the episodes that it plays. If the
        caller is cancelled, as by Ctrl-C, the work is interrupted, and can be resumed."""
        context = contextvars.copy_context()
        context.run(PROGRAM.set, program)
        thread: list[int] = []

        def numbered() -> T:
            thread.append(threading.get_ident())
            return work()

        future = self._threads.submit(context.run, numbered)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if thread and not future.done():
                _interrupt(thread[0])
                if program is not None:
                    program.wake()
            raise

    def stage(self, label: str, step: int, request: Request) -> Artifact:
        """Run a stage, or load it from the cache, and report it. Called in the thread of the stages."""
        return self.execution().artifact(label, step, request)

    def execution(self) -> Execution:
        """Return the execution of the run's stages; the first call opens the run."""
        if self._execution is not None:
            return self._execution
        from flows.execution import tracking
        from flows.execution.executor import Execution
        from flows.terminal.console import Console, hush

        hush()
        self._started, root = time.monotonic(), Path(self.spec.root)
        with ExitStack() as stack:
            tracker, writer = stack.enter_context(tracking.recorded(self.spec, self._overrides))
            log = root / "logs" / f"{self.spec.name}-{tracker.run_id[:8]}.log"
            self._execution = Execution(self.spec, self.context, Console(), tracker, log, writer)
            stack.callback(self._execution.close)
            self._services = stack.pop_all()
        atexit.register(self._at_exit)
        return self._execution

    def trained(self, number: int, artifacts: dict[str, Artifact], spec: ExperimentSpec) -> None:
        """Record a round: its trajectories, scores, selection and checkpoint, by stage. spec: with its algorithm."""
        from flows.reporting.console_lines import round_teller

        execution = self.execution()
        execution.spec = self.spec.model_copy(update={"algorithm": spec.algorithm, "rounds": number})
        self.outcome.rounds.append(artifacts)
        self.outcome.checkpoint, self.outcome.step = artifacts["train"], number
        round_teller(execution)(number, artifacts)

    def evaluate(self, name: str | None, step: int, request: Request) -> Artifact:
        """Evaluate the current policy. name: of an evaluation on scenarios of its own; None: the first one of a policy
        is the main one, and further ones are named by their number."""
        outcome, first = self.outcome, str(step or "start")
        names = [
            first if name is None else f"{name} {step}",
            *(f"{name or first}.{number}" for number in range(2, 1000)),
        ]
        label = next(label for label in names if self._requests.setdefault(label, request) == request)
        evaluation = self.stage(f"evaluate[{label}]", step, request)
        if label != first or not step:
            outcome.evaluations[label] = evaluation
        if label == first:
            outcome.measured = [measured for measured in outcome.measured if measured.step != step]
            outcome.measured.append(EvaluatedPolicy(step, outcome.checkpoint, evaluation))
            self._evaluated = (step, request)
        return evaluation

    def close(self, error: BaseException | None = None) -> Results | None:
        """End the run: write its report and its results, or its failure. Return the results, or None."""
        if self._execution is None or self._services is None:
            return None
        atexit.unregister(self._at_exit)
        execution, services, self._execution = self._execution, self._services, None
        if error is not None:
            services.__exit__(type(error), error, error.__traceback__)
            return None
        with services:
            result = self._conclude(execution)
        self._requests = {}
        step = self.outcome.step
        self.outcome, self._evaluated = RunOutcome(checkpoint=self.outcome.checkpoint, step=step, begin=step), None
        return result

    def _conclude(self, execution: Execution) -> Results:
        from flows.reporting import console_lines, results

        outcome = self.outcome
        if self._evaluated is not None and self._evaluated[0]:
            outcome.evaluations[FINAL] = execution.artifact("evaluate[final]", *self._evaluated)
        release, seconds = results.ReleaseResult(_digest(outcome.checkpoint)), time.monotonic() - self._started
        command = [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]
        result = results.conclude(execution, outcome, self._overrides, release, seconds=seconds, command=command)
        assert execution.record is not None
        assert execution.tracker is not None
        execution.record.run.spec["rounds"] = len(outcome.rounds)
        execution.record.run.result = json.loads(result.to_json())
        console_lines.show(result, execution.console, execution.tracker.ui_command, None)
        return result

    def _at_exit(self) -> None:
        self.close(getattr(sys, "last_value", None))


def _digest(checkpoint: Artifact | None) -> str | None:
    from components.algorithms.train import policy_digest

    return None if checkpoint is None else policy_digest(checkpoint.path)


def _interrupt(thread: int) -> None:
    """Raise KeyboardInterrupt in a thread, at its next instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
