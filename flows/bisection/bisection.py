"""Bisection of two runs: the change of settings, data, code or packages that made them differ.

1. The settings of the good run are run with the present code and data. If they reproduce the difference, its cause lies
   outside the settings (`provenance`).
2. The settings of the bad run are run likewise. If they do not reproduce it, its cause lies outside the settings too.
3. Otherwise delta debugging (`minimal_changes`) finds a minimal set of changed settings that reproduces it, the
   cheapest first.

A run whose stages are all those of a recorded run is not repeated. A change reproduces the difference if the 95 %
interval of its effect excludes zero on the same side, and the effect is at least `SHARE` of the difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from components.errors import EspalierError, SpecError
from components.specs import validate
from flows.bisection.changes import SettingChange, applied, changes_between, minimal_changes
from flows.bisection.ends import Ends, EvaluatedRun, PairedEffect, evaluated, paired_effect
from flows.bisection.provenance import outside_cause, settings
from flows.experiment.spec import ExperimentSpec
from flows.history.code import CodeRecords
from flows.history.labels import MOST_CHARACTERS, Labels
from flows.history.records import Records, RunRecord
from flows.planning.plan import plan as plan_run
from flows.planning.run_plan import PlannedStage
from flows.reporting.settings import setting_differences
from flows.terminal.console import duration


@dataclass(frozen=True)
class PlannedStep:
    """Planned run."""

    stages: tuple[PlannedStage, ...]
    seconds: float | None
    """Expected time of the stages with a known one; None if none of those to run is known."""
    cost: float | None
    """Expected price of the stages with a known one; None if none of those to run is known."""
    unknown: int
    """Number of stages to run whose time is unknown."""

    @property
    def pending(self) -> int:
        """Number of stages to run."""
        return sum(stage.status != "cached" for stage in self.stages)

    @property
    def order(self) -> tuple[float, float, int]:
        """Sort key: price, time, number of stages to run."""
        return self.cost or 0.0, self.seconds or 0.0, self.pending

    def same_as(self, other: PlannedStep) -> bool:
        """Return True if both runs have the same stages with the same known keys."""
        keys, others = ({stage.label: stage.key for stage in step.stages} for step in (self, other))
        return None not in keys.values() and keys == others

    def repeats(self, run: RunRecord, same_root: bool) -> bool:
        """Return True if the stages are those of a recorded run, so that the run would have its result. same_root: the
        plan is for the root of the run; for another root, all stages must be cached there."""
        recorded = {stage.label: stage.key for stage in run.stages}
        known = [stage for stage in self.stages if stage.key is not None]
        if any(recorded.get(stage.label) != stage.key for stage in known):
            return False
        return (same_root or len(known) == len(self.stages)) and (
            same_root or all(stage.status == "cached" for stage in self.stages)
        )

    def text(self) -> str:
        """Return the plan as text."""
        if not self.pending:
            return f"all {len(self.stages)} stages cached"
        time = "time unknown" if self.seconds is None else duration(self.seconds)
        least = "at least " if self.unknown and self.seconds is not None else ""
        cost = "price unknown" if self.cost is None else f"price {self.cost:.2f}"
        return f"{self.pending} of {len(self.stages)} stages to run, {least}{time}, {cost}"


def plan_step(spec: ExperimentSpec, root: Path, similar: RunRecord) -> PlannedStep:
    """Return the plan of a run. similar: run whose stages of the same label give the times that the plan lacks."""
    stages = plan_run(spec).stages
    recorded = {stage.label: stage for stage in similar.stages}
    seconds, costs, unknown = [], [], 0
    for stage in stages:
        if stage.status == "cached":
            continue
        time, cost = stage.seconds, stage.cost
        earlier = recorded.get(stage.label)
        if time is None and earlier is not None and earlier.status == "ran":
            time, cost = earlier.seconds, earlier.cost
        unknown += time is None
        seconds += [] if time is None else [time - stage.overlapped_seconds]
        costs += [] if cost is None else [cost]
    pending = any(stage.status != "cached" for stage in stages)
    return PlannedStep(
        tuple(stages),
        None if pending and not seconds else sum(seconds),
        None if pending and not costs else sum(costs),
        unknown,
    )


TAG = "bisect"
"""Tag of the runs of a bisection."""
SHARE = 0.5
"""Smallest share of the difference that a change must have to explain it."""
GOOD_NOW, BAD_NOW = "settings of GOOD, present code and data", "settings of BAD, present code and data"

Effect = Literal["reproduces", "part", "none", "opposite", "failed", "planned"]
Play = Callable[[Mapping[str, Any], Sequence[str]], tuple[str | None, str]]
"""Run of a spec with overrides: the id of its run, or None and the message of its failure."""


@dataclass(frozen=True)
class BisectionStep:
    """Tested change."""

    change: str
    keys: Sequence[str]
    plan: PlannedStep
    verdict: Effect
    effect: PairedEffect | None = None
    seconds: float = 0.0
    run: str | None = None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the step as JSON data."""
        return {
            "change": self.change,
            "keys": list(self.keys),
            "price": self.plan.cost,
            "planned_seconds": self.plan.seconds,
            "stages": self.plan.pending,
            "seconds": round(self.seconds, 2),
            "effect": None if self.effect is None else self.effect.difference,
            "interval": None if self.effect is None else self.effect.interval,
            "verdict": self.verdict,
            "run": self.run,
            "problem": self.problem or None,
        }


@dataclass
class BisectionResult:
    """Result of a bisection."""

    verdict: Literal["setting", "combination", "data", "code", "packages", "unknown", "planned", "budget"]
    cause: dict[str, Any] | None
    effect: PairedEffect | None
    steps: list[BisectionStep] = field(default_factory=list)


class HoursSpent(Exception):
    """Signal that the next step would exceed the maximum time."""


class Bisection:
    """Search for the cause of the difference of two runs.

    root: of the two runs. workspace: root of the runs of the bisection. play: runs a spec. say: receives lines on the
    progress. max_hours: maximum time of the steps."""

    def __init__(
        self,
        ends: Ends,
        root: Path,
        workspace: Path,
        play: Play,
        say: Callable[[str], None],
        max_hours: float | None = None,
    ):
        self.ends = ends
        self.root = root
        self.workspace = workspace
        self.steps: list[BisectionStep] = []
        self._play, self._say, self._max_hours = play, say, max_hours
        self._good, self._bad = (settings(run.record.spec, workspace, root) for run in (ends.good, ends.bad))
        self._base = ends.good
        self._base_plan = plan_step(self._spec(self._good), workspace, ends.good.record)
        self._runs: dict[str, EvaluatedRun] = {}
        self._code = CodeRecords(workspace)
        differences = setting_differences([ends.good.record, ends.bad.record], [ends.good.reader, ends.bad.reader])
        paths = [path for path in differences.relevant if path != ("seeds",)]
        changes = changes_between(self._good, self._bad, paths, self._is_valid)
        planned = [(change, self._plan([change])) for change in changes]
        self.planned_changes = sorted(planned, key=lambda pair: (pair[1].order, pair[0].key))
        """Changes of settings with the plan of each alone, the cheapest first."""

    def _plan(self, changes: Sequence[SettingChange]) -> PlannedStep:
        """Return the plan of the good run's settings with these changes."""
        return plan_step(self._spec(applied(self._good, changes)), self.workspace, self.ends.good.record)

    def planned(self) -> BisectionResult:
        """Return the steps that the bisection would take if each change were tested alone. Runs nothing."""
        if not self._base_plan.repeats(self.ends.good.record, self.workspace == self.root):
            self.steps.append(BisectionStep(GOOD_NOW, (), self._base_plan, "planned"))
        for change, plan in self.planned_changes:
            self.steps.append(BisectionStep(change.text(), [change.key], plan, "planned"))
        return BisectionResult("planned", None, None, self.steps)

    def find(self) -> BisectionResult:
        """Return the cause. Runs the steps that it needs. Raises KeyboardInterrupt."""
        try:
            return self._find()
        except HoursSpent:
            return BisectionResult("budget", None, None, self.steps)

    def _find(self) -> BisectionResult:
        if not self._base_plan.repeats(self.ends.good.record, self.workspace == self.root):
            step = self._step(GOOD_NOW, (), self._good, self._base_plan, self.ends.good)
            if step.verdict == "reproduces":
                return self._outside(self.ends.good, self._runs[GOOD_NOW], step.effect)
            if step.run is None:
                return BisectionResult("unknown", None, None, self.steps)
            self._base = self._runs[GOOD_NOW]
        plan = plan_step(self._spec(self._bad), self.workspace, self.ends.bad.record)
        if plan.repeats(self.ends.bad.record, self.workspace == self.root):
            total = paired_effect(self.ends.metric, self._base.episodes, self.ends.bad.episodes)
        else:
            step = self._step(BAD_NOW, (), self._bad, plan, self._base)
            if step.run is None:
                return BisectionResult("unknown", None, None, self.steps)
            if step.verdict != "reproduces" or step.effect is None:
                missing = paired_effect(self.ends.metric, self._runs[BAD_NOW].episodes, self.ends.bad.episodes)
                return self._outside(self._runs[BAD_NOW], self.ends.bad, missing)
            total = step.effect
        changes = [change for change, _ in self.planned_changes]
        effects = {_keys(changes): total}

        def reproduces(changes: Sequence[SettingChange]) -> bool:
            text = "; ".join(change.text() for change in changes)
            step = self._step(text, changes, applied(self._good, changes), self._plan(changes), self._base)
            if step.effect is not None:
                effects[_keys(changes)] = step.effect
            return step.verdict == "reproduces"

        minimal = minimal_changes(changes, reproduces)
        effect = effects[_keys(minimal)]
        if len(minimal) == 1:
            return BisectionResult("setting", {"kind": "setting", **minimal[0].to_json()}, effect, self.steps)
        combined = {"kind": "combination", "changes": [change.to_json() for change in minimal]}
        return BisectionResult("combination", combined, effect, self.steps)

    def _outside(self, good: EvaluatedRun, bad: EvaluatedRun, effect: PairedEffect | None) -> BisectionResult:
        cause = outside_cause(good, bad, self._code)
        return BisectionResult("unknown" if cause is None else cause["kind"], cause, effect, self.steps)

    def _step(
        self,
        change: str,
        changes: Sequence[SettingChange],
        data: Mapping[str, Any],
        plan: PlannedStep,
        base: EvaluatedRun,
    ) -> BisectionStep:
        """Run a step, unless it repeats the base, and report it."""
        number = len(self.steps) + 1
        self._say(f"step {number}: {change}\n  plan: {plan.text()}")
        if changes and plan.same_as(self._base_plan):
            zero = paired_effect(self.ends.metric, base.episodes, base.episodes)
            step = BisectionStep(change, _keys(changes), plan, "none", zero)
            self._say("  no effect: every stage keeps its key")
        else:
            step = self._run_step(change, changes, data, plan, base)
        self.steps.append(step)
        return step

    def _run_step(
        self,
        change: str,
        changes: Sequence[SettingChange],
        data: Mapping[str, Any],
        plan: PlannedStep,
        base: EvaluatedRun,
    ) -> BisectionStep:
        spent = sum(step.seconds for step in self.steps)
        if self._max_hours is not None and spent + (plan.seconds or 0.0) > self._max_hours * 3600:
            self._say(f"  not run: {spent / 3600:.2f} h are spent, and --max-hours is {self._max_hours:g}")
            raise HoursSpent
        start, began = time.monotonic(), time.time()
        end = self.ends.bad if change == BAD_NOW else self.ends.good
        lines = [line for part in changes for line in part.overrides()]
        run_id, problem = self._play(data, [*end.record.overrides, *lines])
        seconds = time.monotonic() - start
        try:
            if run_id is None:
                raise EspalierError(problem)
            run = evaluated(Records(self.workspace).get(run_id), self.workspace)
            if run.record.started >= began:  # not an earlier run with the same settings
                self._label(run, change)
            effect = paired_effect(self.ends.metric, base.episodes, run.episodes)
        except EspalierError as error:
            self._say(f"  failed: {error}")
            return BisectionStep(change, _keys(changes), plan, "failed", None, seconds, run_id, str(error))
        self._runs[change] = run
        verdict = self._verdict(effect)
        self._say(f"  {self.ends.metric} {effect.text()}: {_VERDICTS[verdict]}")
        return BisectionStep(change, _keys(changes), plan, verdict, effect, seconds, run_id)

    def _label(self, run: EvaluatedRun, change: str) -> None:
        """Tag a run of the bisection, and note what it tests."""
        labels = Labels(self.workspace)
        labels.tag(run.record, [TAG])
        good, bad = self.ends.good.record, self.ends.bad.record
        labels.note(run.record, f"bisection of {good.short} and {bad.short}: {change}"[:MOST_CHARACTERS])

    def _verdict(self, effect: PairedEffect) -> Effect:
        """Return the verdict on an effect against the difference to explain."""
        total = self.ends.effect
        if effect.outcome == "undecided":
            return "none"
        if effect.outcome != total.outcome:
            return "opposite"
        return "reproduces" if abs(effect.difference) >= SHARE * abs(total.difference) else "part"

    def _is_valid(self, data: Mapping[str, Any]) -> bool:
        try:
            self._spec(data)
        except SpecError:
            return False
        return True

    def _spec(self, data: Mapping[str, Any]) -> ExperimentSpec:
        return validate(ExperimentSpec, data)


def _keys(changes: Sequence[SettingChange]) -> tuple[str, ...]:
    return tuple(change.key for change in changes)


_VERDICTS: dict[Effect, str] = {
    "reproduces": "reproduces the difference",
    "part": "a part of the difference",
    "none": "no effect beyond noise",
    "opposite": "the opposite of the difference",
}
