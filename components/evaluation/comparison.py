"""Runs side by side: one self-contained HTML page, in the look of the report and from the same parts.

`Comparison` is plain data that a flow fills; the first run is the baseline. `compare_episodes` says how the last
evaluation of a run differs from the baseline's, on the scenarios that both played; `render` makes the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.evaluation import examples, plots
from components.evaluation.metrics import paired_difference
from components.evaluation.page import page
from components.evaluation.report import CURVES, Curve, Evaluation
from components.redaction import mask
from components.trajectories.schema import Scenario, Trajectory

MOST_PAIRS = 100
"""Changed scenarios of one run whose episodes are on the page; the others are only named."""
HELDOUT = "heldout_success"
"""The curve that is drawn from evaluations."""


@dataclass(frozen=True)
class StageTotal:
    """All stages of one kind in one run."""

    ran: int = 0
    cached: int = 0
    seconds: float = 0.0
    """Time that this run waited for them."""
    cost: float = 0.0
    """What they cost in this run, in the currency of the prices."""
    unnoticed: float = 0.0
    """Further time that they took beside another stage, which the run would have waited for anyway."""


@dataclass(frozen=True)
class Run:
    """One run, as far as it got."""

    letter: str
    """A is the baseline."""
    id: str
    name: str
    """Name of its experiment."""
    seed: int
    status: str
    """`finished`, `failed`, `killed` or `running`."""
    started: str
    """Date and time, as it is to be shown."""
    seconds: float | None
    """Wall-clock time; None where it is not known."""
    git_commit: str
    overrides: Sequence[str]
    evaluations: Mapping[str, Evaluation]
    """`start`, `sft`, `final`: those that there are, in this order."""
    rounds: Mapping[int, Mapping[str, float]]
    """Metrics by number of the round, under the names of `components.evaluation.report.CURVES`."""
    stages: Mapping[str, StageTotal]
    """By kind of stage."""
    heldout: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Summaries of its evaluations by the round after which the policy stood, from the start of the rounds (0; of a
    fork, the step where it begins) to the final policy."""
    chosen: int | None = None
    """The round of the final policy where the run chose the best of those; else None."""
    notes: Sequence[str] = ()
    """What is missing, and why."""

    @property
    def short(self) -> str:
        return self.id[:8]

    @property
    def last(self) -> Evaluation | None:
        """The evaluation of its latest policy that was evaluated."""
        return list(self.evaluations.values())[-1] if self.evaluations else None

    @property
    def total(self) -> StageTotal:
        found = self.stages.values()
        return StageTotal(
            sum(one.ran for one in found),
            sum(one.cached for one in found),
            sum(one.seconds for one in found),
            sum(one.cost for one in found),
            sum(one.unnoticed for one in found),
        )


@dataclass(frozen=True)
class Against:
    """The last evaluation of one run against the baseline's."""

    letter: str
    """The run that is compared with the baseline."""
    title: str
    """Which policies: `B after GRPO against A after SFT`."""
    difference: Mapping[str, Any] | None = None
    """What `metrics.paired_difference` returns; None where there is nothing to compare."""
    notes: Sequence[str] = ()
    """Scenarios that are not the same, and why there is no difference."""
    pairs: Mapping[str, tuple[Trajectory, Trajectory]] = field(default_factory=dict)
    """By id of each scenario that changed: the baseline's episode and the other's."""

    @property
    def improved(self) -> Sequence[str]:
        """Ids of the scenarios that the baseline did not solve and this run does."""
        return self.difference["improved"] if self.difference else ()

    @property
    def regressed(self) -> Sequence[str]:
        """Ids of the scenarios that the baseline solved and this run does not."""
        return self.difference["regressed"] if self.difference else ()


@dataclass(frozen=True)
class Comparison:
    """Everything that the page shows."""

    runs: Sequence[Run]
    results: Mapping[str, Sequence[str]]
    """What determines results and is not the same in all runs: by key, the value in each run as text."""
    rest: Mapping[str, Sequence[str]]
    """The same for what does not: where and how fast a run works, what it is called."""
    against: Sequence[Against]
    """Of each run but the first."""
    created: str = ""
    command: str = ""
    """The command that makes this page again."""


def compare_episodes(letter: str, title: str, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Against:
    """`after` against `before` on the scenarios that both played. Scenarios with one id and different content are not
    the same, and count for neither."""
    ours, theirs = _scenarios(before), _scenarios(after)
    same = {name for name in ours.keys() & theirs.keys() if ours[name] == theirs[name]}
    other = sorted((ours.keys() & theirs.keys()) - same)
    notes = []
    if other:
        notes.append(f"{_count(other)} of the same id are other tasks in the two runs and are left out")
    if only := sorted(ours.keys() - theirs.keys()):
        notes.append(f"{_count(only)} only A played")
    if only := sorted(theirs.keys() - ours.keys()):
        notes.append(f"{_count(only)} only {letter} played")
    first, second = ([one for one in episodes if one.group in same] for episodes in (before, after))
    try:
        difference = paired_difference(first, second)
    except ValueError:
        return Against(letter, title, None, [*notes, "there is no scenario that both played to its end"])
    if failed := difference["left_out"]:
        notes.append(f"{_count(failed)} failed to run in one of the two and are left out")
    ours_played, theirs_played = ({one.group: one for one in reversed(side)} for side in (first, second))
    changed = [*difference["improved"], *difference["regressed"]]
    pairs = {name: (ours_played[name], theirs_played[name]) for name in changed}
    return Against(letter, title, difference, notes, pairs)


def render(comparison: Comparison) -> str:
    """The page as HTML text."""
    runs = comparison.runs
    return page(
        "comparison.html.j2",
        comparison=comparison,
        evaluations=[
            {
                "name": name,
                "rows": [(index, run.evaluations[name]) for index, run in enumerate(runs) if name in run.evaluations],
            }
            for name in dict.fromkeys(name for run in runs for name in run.evaluations)
        ],
        differences={one.title: one.difference for one in comparison.against if one.difference is not None},
        results=mask(dict(comparison.results)),
        rest=mask(dict(comparison.rest)),
        curves=_curves(runs),
        kinds=list(dict.fromkeys(kind for run in runs for kind in run.stages)),
        changes=[_changes(number, one) for number, one in enumerate(comparison.against)],
        colours=plots.COLOURS,
        most=MOST_PAIRS,
    )


def _changes(number: int, against: Against) -> dict[str, Any]:
    """Lists of changed scenarios, each with the anchor of its episodes; anchors are made of numbers only."""
    shown = list(against.pairs)[:MOST_PAIRS]
    anchors = {name: f"episodes-{number}-{index}" for index, name in enumerate(shown)}
    return {
        "against": against,
        "number": number,
        "lists": [
            ("From fail to success", [(name, anchors.get(name)) for name in against.improved]),
            ("From success to fail", [(name, anchors.get(name)) for name in against.regressed]),
        ],
        "pairs": [
            {"anchor": anchors[name], "scenario": name, "sides": [examples.view(side) for side in against.pairs[name]]}
            for name in shown
        ],
    }


def _curves(runs: Sequence[Run]) -> list[dict[str, str]]:
    found = []
    for curve in CURVES:
        note, svg = _heldout(curve, runs) if curve.key == HELDOUT else (curve.note, _training(curve, runs))
        if svg:
            found.append({"title": curve.title, "note": note, "svg": svg})
    return found


def _training(curve: Curve, runs: Sequence[Run]) -> str:
    series = {run.letter: {x: values.get(curve.key) for x, values in run.rounds.items()} for run in runs}
    return plots.lines_chart(series, name=curve.title, text=curve.text, low=curve.low, high=curve.high)


def _heldout(curve: Curve, runs: Sequence[Run]) -> tuple[str, str]:
    """A note and the chart; empty where no run was evaluated more than once in the course of its rounds."""
    if all(len(run.heldout) < 2 for run in runs):
        return "", ""
    measured = {run.letter: {x: one["success"] for x, one in run.heldout.items()} for run in runs}
    series = {letter: {x: one["mean"] for x, one in values.items()} for letter, values in measured.items()}
    intervals = {
        letter: {x: (one["low"], one["high"]) for x, one in values.items() if one["low"] is not None}
        for letter, values in measured.items()
    }
    rings = {run.letter: (run.chosen, "chosen as the best") for run in runs if run.chosen is not None}
    note = f"share, with 95 % interval{'; ring: chosen as the best' if rings else ''}"
    svg = plots.lines_chart(
        series, name=curve.title, text=curve.text, low=curve.low, high=curve.high, intervals=intervals, rings=rings
    )
    return note, svg


def _scenarios(episodes: Sequence[Trajectory]) -> dict[str, Scenario]:
    return {one.group: one.scenario for one in episodes}


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} scenario{'' if len(names) == 1 else 's'}"
