"""Budget of a run while it runs: what is spent, what the next stage is expected to take, and what is left.

Spent are the stages that this run executed, and those of earlier attempts of the same run: runs with the same
experiment, seed and configuration that did not finish. Cached stages cost nothing. A stage is expected to take the
median of the stages of its kind that this run has executed, else the estimate of the plan. Without either it is allowed
to start, since nothing is known of it. Background stages (`collect.overlap`) count with the stage beside which they
run. Branches that run at the same time (`Run.parallel`) check each of their stages, and count those that are running.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

from components.artifacts import Artifact
from components.errors import BudgetReached, Problem, SpecError
from components.redaction import mask
from flows.execution.executor import Execution
from flows.execution.parallel import ParallelRunner, overlaps
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Notice, Records, RunRecord, StageRecord
from flows.planning.run_plan import PlannedStage, RunPlan
from flows.recipes.outcome import RunOutcome
from flows.stages.anchors import is_anchor_label
from flows.stages.base import Request, StageRunner
from flows.stages.execute import find_stage
from flows.terminal.console import duration

logger = logging.getLogger(__name__)

T = TypeVar("T")

WARN = 0.8
"""Share of the budget from which the run gives a notice."""
NOT_COMPARED = ("budget", "notify", "tracking", "compute")
"""Sections in which two attempts of one run may differ."""


@dataclass(frozen=True)
class Amount:
    """Cost and time; None: unknown."""

    cost: float | None = 0.0
    seconds: float | None = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(_sum(self.cost, other.cost), _sum(self.seconds, other.seconds))

    def text(self) -> str:
        """Return the amount in words."""
        cost = "unknown cost" if self.cost is None else f"cost {self.cost:.2f}"
        return f"{cost}, {'unknown time' if self.seconds is None else duration(self.seconds)}"


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


def earlier_attempts(spec: ExperimentSpec) -> list[RunRecord]:
    """Return the unfinished runs of the same experiment, seed and configuration since the last finished one."""
    attempts = []
    records, own = Records(spec.root), _compared(mask(spec.model_dump(mode="json", by_alias=True)))
    for run in records.all():
        if (run.name, run.seed, _compared(run.spec)) != (spec.name, spec.seed, own):
            continue
        if run.status in ("FINISHED", "PRUNED"):
            break
        if not records.alive(run):
            attempts.append(run)
    return attempts


def _compared(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in NOT_COMPARED}


def spent_of(stages: Sequence[StageRecord]) -> Amount:
    """Return the cost and the time of executed stages."""
    ran = [stage for stage in stages if stage.status != "cached"]
    return Amount(sum(stage.cost for stage in ran), sum(stage.waited for stage in ran))


class RunBudget:
    """Budget of one run."""

    def __init__(self, spec: ExperimentSpec, planned: RunPlan):
        self.spec = spec
        self._planned = {stage.label: stage for stage in planned.stages}
        self._order = planned.stages
        self._before = spent_of([stage for run in earlier_attempts(spec) for stage in run.stages])
        self._warned = False

    def refuse_first(self) -> None:
        """Raise SpecError if the first stage to run is expected to exceed the budget."""
        pending = [stage for stage in self._order if stage.status != "cached"]
        if not pending:
            return
        expected = _expected_of(pending[0])
        spent = f", of which {self._before.text()} are spent by earlier attempts" if self._before != Amount() else ""
        problems = [
            Problem(
                f"budget.{name}",
                f"{limit:g}: {pending[0].label} is expected to take {expected.text()}{spent}, which exceeds it; set a "
                "larger budget, or smaller stages",
            )
            for name, limit in self._exceeded(self._before + expected)
        ]
        if problems:
            raise SpecError(problems)

    def _exceeded(self, total: Amount) -> Iterator[tuple[str, float]]:
        """Yield name and value of each limit that an amount exceeds."""
        budget = self.spec.budget
        if budget.cost is not None and total.cost is not None and total.cost > budget.cost:
            yield "cost", budget.cost
        if budget.hours is not None and total.seconds is not None and total.seconds > budget.hours * 3600:
            yield "hours", budget.hours

    def guard(
        self,
        call: StageRunner,
        execution: Execution,
        outcome: Callable[[], RunOutcome],
        show: Callable[[str], None] = lambda text: None,
    ) -> StageRunner:
        """Return the runner of stages that ends the run before a stage that would exceed the budget.

        outcome: function that returns the outcome so far. show: called with the spent amount after each stage that ran.
        The runner raises BudgetReached."""

        run = self._limited(execution, outcome)

        def limited(label: str, step: int, request: Request) -> Artifact:
            artifact = run(call, label, step, request)
            done = execution.done.get(label)
            if done is not None and done.status != "cached":
                self._report(execution, step)
                show(self.text(self.spent(execution)))
            return artifact

        return limited

    def guard_branches(
        self,
        at_once: ParallelRunner,
        execution: Execution,
        outcome: Callable[[], RunOutcome],
        show: Callable[[str], None] = lambda text: None,
    ) -> ParallelRunner:
        """Return the runner of branches that ends the run before a stage of a branch that would exceed the budget
        together with the stages that run beside it, which finish. The arguments are those of `guard`."""

        def run(branches: Sequence[Callable[[StageRunner], T]]) -> list[T]:
            limited, before = self._limited(execution, outcome), len(execution.done)
            results = at_once([lambda call, work=branch: work(partial(limited, call)) for branch in branches])  # type: ignore[misc]
            done = [stage for stage in list(execution.done.values())[before:] if stage.status != "cached"]
            if done:
                self._report(execution, done[-1].step)
                show(self.text(self.spent(execution)))
            return results

        return run

    def _limited(
        self, execution: Execution, outcome: Callable[[], RunOutcome]
    ) -> Callable[[StageRunner, str, int, Request], Artifact]:
        """Return the function that runs a stage, or raises BudgetReached if it would exceed the budget together with
        the other stages that the function is running."""
        lock, running = threading.Lock(), dict[str, tuple[float, Amount]]()

        def limited(call: StageRunner, label: str, step: int, request: Request) -> Artifact:
            if find_stage(request, execution.context) is None:
                expected = self._expected(label, request.stage, execution)
                with lock:
                    spent, beside = self._committed(execution, running), tuple(running)
                    running[label] = time.monotonic(), expected
                    if limits := list(self._exceeded(self._committed(execution, running))):
                        del running[label]
                        raise BudgetReached(self._message(label, limits, spent, expected, execution, outcome(), beside))
            try:
                return call(label, step, request)
            finally:
                with lock:
                    running.pop(label, None)

        return limited

    def _committed(self, execution: Execution, running: Mapping[str, tuple[float, Amount]]) -> Amount:
        """Return what is spent, including the finished stages of branches, and what the running stages are expected to
        take. Time at which several run counts once; unknown estimates count as nothing. running: start and expected
        amount of each stage by label."""
        unreported = dict(execution.unreported)
        finished = [stage for stage in unreported.values() if stage.status != "cached"]
        expected = [started for label, started in running.items() if label not in unreported]
        spans = [(stage.ended - stage.seconds, stage.ended) for stage in finished]
        spans += [(start, start + (amount.seconds or 0.0)) for start, amount in expected]
        seconds = sum(end - start for start, end in spans) - sum(overlaps(spans))
        cost = sum(stage.cost for stage in finished) + sum(amount.cost or 0.0 for _, amount in expected)
        return self.spent(execution) + Amount(cost, seconds)

    def spent(self, execution: Execution) -> Amount:
        """Return what this run and its earlier attempts have spent."""
        done = [stage for stage in execution.done.values() if stage.status != "cached"]
        return self._before + Amount(sum(stage.cost for stage in done), sum(stage.waited for stage in done))

    def share(self, spent: Amount) -> float:
        """Return the spent share of the budget, by the limit that is closer."""
        budget, shares = self.spec.budget, [0.0]
        if budget.cost is not None:
            shares.append((spent.cost or 0.0) / budget.cost)
        if budget.hours is not None:
            shares.append((spent.seconds or 0.0) / (budget.hours * 3600))
        return max(shares)

    def text(self, spent: Amount) -> str:
        """Return what is spent of each limit."""
        budget, parts = self.spec.budget, []
        if budget.cost is not None:
            parts.append(f"cost {spent.cost or 0.0:.2f} of {budget.cost:g}")
        if budget.hours is not None:
            parts.append(f"{(spent.seconds or 0.0) / 3600:.2f} of {budget.hours:g} hours")
        return f"budget: {', '.join(parts)} ({self.share(spent):.0%})"

    def _expected(self, label: str, kind: str, execution: Execution) -> Amount:
        """Return the expected amount of a stage, with that of background stages beside it."""
        total = self._alone(label, kind, execution)
        for stage in self._order:
            if stage.beside == label and stage.status != "cached":
                total += self._alone(stage.label, stage.stage, execution, stage.overlapped_seconds)
        return total

    def _alone(self, label: str, kind: str, execution: Execution, overlapped: float = 0.0) -> Amount:
        finished = [*execution.done.values(), *dict(execution.unreported).values()]
        anchors = is_anchor_label(label)  # fewer episodes than those of a round
        same = [stage for stage in finished if _kind(stage.label) == kind and is_anchor_label(stage.label) == anchors]
        done = [stage for stage in same if stage.status != "cached"]
        if done:
            seconds = median(stage.seconds for stage in done)
            return Amount(median(stage.cost for stage in done), max(0.0, seconds - overlapped))
        planned = self._planned.get(label)
        return Amount(None, None) if planned is None or planned.status == "cached" else _expected_of(planned)

    def _report(self, execution: Execution, step: int) -> None:
        """Report the spent amount to the log, the console's notice at 80 %, MLflow and Prefect."""
        spent = self.spent(execution)
        logger.info("%s", self.text(spent))
        if execution.tracker is not None:
            tracker = execution.tracker
            values = {"cost/spent": spent.cost or 0.0, "time/spent_hours": (spent.seconds or 0.0) / 3600}
            tracker.outbox.put(lambda: tracker.log_metrics(values, step))
        if self.share(spent) >= WARN and not self._warned:
            self._warned = True
            execution.notice(Notice("budget", step, self.text(spent)))

    def _message(
        self,
        label: str,
        limits: Sequence[tuple[str, float]],
        spent: Amount,
        expected: Amount,
        execution: Execution,
        outcome: RunOutcome,
        running: Sequence[str] = (),
    ) -> str:
        limit = " and ".join(f"budget.{name}={value:g}" for name, value in limits)
        remaining = self._remaining(label)
        total = sum((self._alone(stage.label, stage.stage, execution) for stage in remaining), Amount())
        labels = ", ".join(stage.label for stage in remaining[:8]) + (", …" if len(remaining) > 8 else "")
        beside = f", with the estimates of {', '.join(running)}" if running else ""
        more = (
            f"{len(remaining)} stages remain ({labels}): {total.text()}" if remaining else "No other stage is planned"
        )
        return (
            f"{limit} ends the run before {label}, whose estimate is {expected.text()}; spent{beside}: {spent.text()}. "
            f"{_policy(execution, outcome)} {more}. The same command with a larger budget resumes here"
        )

    def _remaining(self, label: str) -> list[PlannedStage]:
        """Return the planned stages from this one on that are not cached."""
        labels = [stage.label for stage in self._order]
        start = labels.index(label) if label in labels else len(labels)
        return [stage for stage in self._order[start:] if stage.status != "cached"]


def _policy(execution: Execution, outcome: RunOutcome) -> str:
    """Return what the run has: its best evaluated policy, and its last one."""
    run = execution.record.run.short if execution.record is not None else "RUN"
    if outcome.checkpoint is None:
        return "Nothing is trained yet."
    known = [(policy.value("success"), policy.step) for policy in outcome.measured if policy.checkpoint is not None]
    evaluated = [(value, step) for value, step in known if value is not None]
    best = max(evaluated, default=None, key=lambda pair: pair[0])
    text = f"The last policy is {run}@{outcome.step}"
    return f"{text}; the best evaluated one {run}@{best[1]} (success {best[0]:.3f})." if best else f"{text}."


def _expected_of(stage: PlannedStage) -> Amount:
    return Amount(stage.cost, stage.seconds)


def _kind(label: str) -> str:
    return label.partition("[")[0]


def sufficiency(spec: ExperimentSpec, planned: RunPlan) -> Iterator[str]:
    """Yield whether the budget suffices for the plan, for each limit."""
    before = spent_of([stage for run in earlier_attempts(spec) for stage in run.stages])
    limits = {
        "cost": (spec.budget.cost, planned.cost, before.cost, 1),
        "hours": (spec.budget.hours, planned.seconds, before.seconds, 3600),
    }
    for name, (limit, expected, spent, unit) in limits.items():
        if limit is None:
            continue
        key = f"budget.{name}={limit:g}"
        if expected is None:
            yield f"{key}: unknown whether it suffices, since estimates are missing; the run watches it"
            continue
        total = (expected + (spent or 0.0)) / unit
        earlier = f", of which earlier attempts spent {(spent or 0.0) / unit:.2f}" if spent else ""
        if total <= limit:
            yield f"{key} suffices: at most {total:.2f} expected{earlier}"
        else:
            stop = _stop(planned, name, limit * unit - (spent or 0.0))
            yield f"{key} does not suffice: {total:.2f} expected{earlier}; the run ends before {stop}"


def _stop(planned: RunPlan, name: str, left: float) -> str:
    """Return the label of the first stage that does not fit."""
    for stage in planned.stages:
        value = stage.cost if name == "cost" else (stage.seconds or 0.0) - stage.overlapped_seconds
        left -= value or 0.0
        if left < 0:
            return stage.label
    return planned.stages[-1].label
