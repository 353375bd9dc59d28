"""Comparisons of runs, and of policies on the same scenarios, as self-contained HTML pages.

`RunComparison` is plain data that a flow fills; the first run is the baseline. `compare_episodes` compares the last
evaluation of a run with the baseline's, on the scenarios that both played; `render` renders the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from components.evaluation.metrics import paired_difference
from components.evaluation.policies import ErrorClass, PoliciesComparison, PolicyResult
from components.evaluation.sequential import alpha_of, describe
from components.evaluation.verdict import Verdict
from components.pages import charts
from components.pages.episodes import view
from components.pages.page import page
from components.pages.report import CURVES, Curve, Evaluation
from components.redaction import mask
from components.trajectories.schema import Trajectory
from components.trajectories.stored import ScoredEpisodes, episodes_of

if TYPE_CHECKING:
    from components.trajectories.columns import EpisodeColumns

MOST_PAIRS = 100
"""Maximum number of changed scenarios per run whose episodes are on the page; of the others, the page lists ids."""
HELDOUT = "heldout_success"
"""Key of the curve that is plotted from evaluations."""
EXAMPLES = 2
"""Number of example episodes of each error class."""
BREAKDOWNS = {"by_type": "Type", "by_difficulty": "Difficulty"}
"""Breakdowns of a summary by scenario, with their titles."""


@dataclass(frozen=True)
class StageTotal:
    """Totals over all stages of one kind in one run."""

    ran: int = 0
    cached: int = 0
    seconds: float = 0.0
    """Time that this run waited for them, in seconds."""
    cost: float = 0.0
    """Cost in this run, in the currency of the prices."""
    overlapped_seconds: float = 0.0
    """Additional seconds that overlapped with another stage, so that the run did not wait for them."""


@dataclass(frozen=True)
class ComparedRun:
    """One run, finished or not."""

    letter: str
    """Letter of the run; A is the baseline. In a comparison of sides, the side with the run's number: A1, A2, B1."""
    id: str
    name: str
    """Name of its experiment."""
    seed: int
    status: str
    """`finished`, `failed`, `killed` or `running`."""
    started: str
    """Date and time, formatted for display."""
    seconds: float | None
    """Wall-clock time; None if unknown."""
    git_commit: str
    overrides: Sequence[str]
    evaluations: Mapping[str, Evaluation]
    """Evaluations by name (`start`, `sft`, `final`), those that exist, in this order."""
    rounds: Mapping[int, Mapping[str, float]]
    """Metrics by round, under the names of `components.pages.report.CURVES`."""
    stages: Mapping[str, StageTotal]
    """Totals by kind of stage."""
    heldout: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Summaries of the evaluations by the round after which the policy was evaluated, from the start of the rounds (0;
    in a fork, the step where it begins) to the final policy."""
    validations: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of held-out rows of imported data, `before` and `after` the training on it."""
    chosen: int | None = None
    """Round of the final policy if the run selected the best one; else None."""
    notes: Sequence[str] = ()
    """Missing data, with the cause."""

    @property
    def short(self) -> str:
        return self.id[:8]

    @property
    def last(self) -> Evaluation | None:
        """The evaluation of the latest evaluated policy, or None."""
        return list(self.evaluations.values())[-1] if self.evaluations else None

    @property
    def total(self) -> StageTotal:
        stages = self.stages.values()
        return StageTotal(
            sum(stage.ran for stage in stages),
            sum(stage.cached for stage in stages),
            sum(stage.seconds for stage in stages),
            sum(stage.cost for stage in stages),
            sum(stage.overlapped_seconds for stage in stages),
        )


class EpisodePairs(Mapping[str, tuple[Trajectory, Trajectory]]):
    """First episodes of two evaluations on some scenarios, by scenario id. They are read when they are asked for."""

    def __init__(self, sides: Sequence[ScoredEpisodes] = (), names: Sequence[str] = ()):
        """sides: the two evaluations. names: ids of the scenarios."""
        self._sides = sides
        self._names = dict.fromkeys(names)

    def rows(self, names: Sequence[str]) -> list[tuple[Trajectory, Trajectory]]:
        """Return the episodes on these scenarios; those of one evaluation are read together."""
        if not names:
            return []
        before, after = (
            side.rows([first_places[name] for name in names])
            for side, first_places in zip(self._sides, self._first_places, strict=True)
        )
        return list(zip(before, after, strict=True))

    @cached_property
    def _first_places(self) -> list[dict[str, int]]:
        """Position of the first episode on each scenario, in each evaluation."""
        groups = [side.columns.group_texts for side in self._sides]
        return [{name: place for place, name in reversed(list(enumerate(names)))} for names in groups]

    def __getitem__(self, name: str) -> tuple[Trajectory, Trajectory]:
        if name not in self._names:
            raise KeyError(name)
        return self.rows([name])[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class BaselineComparison:
    """Comparison of one run's last evaluation with the baseline's."""

    letter: str
    """Letter of the run that is compared with the baseline."""
    title: str
    """Names of the two policies: `B after GRPO against A after SFT`."""
    difference: Mapping[str, Any] | None = None
    """Result of `metrics.paired_difference`; None if there is nothing to compare."""
    notes: Sequence[str] = ()
    """Scenarios that differ between the runs, and the cause of a missing difference."""
    pairs: EpisodePairs = field(default_factory=EpisodePairs)
    """The baseline's episode and this run's, by id of each scenario whose outcome changed."""
    baseline: str = "A"
    """Letter of the baseline."""

    @property
    def sides(self) -> bool:
        """True in a comparison of sides, whose verdicts replace the lists of changed scenarios in the terminal."""
        return self.baseline != "A"

    @property
    def improved(self) -> Sequence[str]:
        """Ids of the scenarios that the baseline did not solve and this run does."""
        return self.difference["improved"] if self.difference else ()

    @property
    def regressed(self) -> Sequence[str]:
        """Ids of the scenarios that the baseline solved and this run does not."""
        return self.difference["regressed"] if self.difference else ()


@dataclass(frozen=True)
class RunComparison:
    """Content of the page."""

    runs: Sequence[ComparedRun]
    results: Mapping[str, Sequence[str]]
    """Settings that affect results and differ between the runs: by key, the value in each run as text."""
    rest: Mapping[str, Sequence[str]]
    """Differing settings that do not affect results, such as machine, speed and names; same form."""
    against: Sequence[BaselineComparison]
    """Comparison of each run except the first with the baseline."""
    verdicts: Sequence[Verdict] = ()
    """Verdict on each side, or each single run, against the baseline."""
    created: str = ""
    command: str = ""
    """Command that generates this page again."""


def compare_episodes(
    letters: tuple[str, str], title: str, first_evaluation: Evaluation, second_evaluation: Evaluation
) -> BaselineComparison:
    """Compare the second evaluation with the first on the scenarios that both played. letters: of the baseline and the
    run.

    Scenarios with equal ids and different content are left out.
    """
    baseline, letter = letters
    before, after = (episodes_of(evaluation.trajectories) for evaluation in (first_evaluation, second_evaluation))
    before_scenarios, after_scenarios = before.scenarios(), after.scenarios()
    same = {
        name
        for name in before_scenarios.keys() & after_scenarios.keys()
        if before_scenarios[name] == after_scenarios[name]
    }
    changed_tasks = sorted((before_scenarios.keys() & after_scenarios.keys()) - same)
    evaluations = {baseline: first_evaluation.summary, letter: second_evaluation.summary}
    notes = [
        f"{name} {describe(summary['sequence'])}" for name, summary in evaluations.items() if "sequence" in summary
    ]
    if changed_tasks:
        notes.append(f"{_count(changed_tasks)} with the same id are different tasks in the two runs and are left out")
    if only := sorted(before_scenarios.keys() - after_scenarios.keys()):
        notes.append(f"{_count(only)} played only by {baseline}")
    if only := sorted(after_scenarios.keys() - before_scenarios.keys()):
        notes.append(f"{_count(only)} played only by {letter}")
    try:
        difference = paired_difference(
            _in_groups(before, same), _in_groups(after, same), alpha_of(*evaluations.values())
        )
    except ValueError:
        return BaselineComparison(
            letter, title, None, [*notes, "no scenario was finished in both runs"], baseline=baseline
        )
    if failed := difference["left_out"]:
        notes.append(f"{_count(failed)} failed to run in one of the two runs and are left out")
    pairs = EpisodePairs([before, after], [*difference["improved"], *difference["regressed"]])
    return BaselineComparison(letter, title, difference, notes, pairs, baseline)


def render(comparison: RunComparison) -> str:
    """Return the page as HTML text."""
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
        differences={
            against.title: against.difference for against in comparison.against if against.difference is not None
        },
        results=mask(dict(comparison.results)),
        rest=mask(dict(comparison.rest)),
        curves=_curves(runs),
        kinds=list(dict.fromkeys(kind for run in runs for kind in run.stages)),
        changes=[_changes(number, against) for number, against in enumerate(comparison.against)],
        most=MOST_PAIRS,
    )


def _changes(number: int, against: BaselineComparison) -> dict[str, Any]:
    """Return the lists of changed scenarios, each with the anchor of its episodes. Anchors contain no scenario ids."""
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
            {
                "anchor": anchors[name],
                "scenario": name,
                "sides": [(against.baseline, view(before)), (against.letter, view(after))],
            }
            for name, (before, after) in zip(shown, against.pairs.rows(shown), strict=True)
        ],
    }


def _curves(runs: Sequence[ComparedRun]) -> list[dict[str, str]]:
    drawn = []
    for curve in CURVES:
        note, svg = _heldout(curve, runs) if curve.key == HELDOUT else (curve.note, _training(curve, runs))
        if svg:
            drawn.append({"title": curve.title, "note": note, "svg": svg})
    return drawn


def _training(curve: Curve, runs: Sequence[ComparedRun]) -> str:
    series = {run.letter: {x: values.get(curve.key) for x, values in run.rounds.items()} for run in runs}
    return charts.lines_chart(series, name=curve.title, text=curve.text, low=curve.low, high=curve.high)


def _heldout(curve: Curve, runs: Sequence[ComparedRun]) -> tuple[str, str]:
    """Return a note and the chart; empty texts if no run was evaluated more than once during its rounds."""
    if all(len(run.heldout) < 2 for run in runs):
        return "", ""
    measured = {run.letter: {x: summary["success"] for x, summary in run.heldout.items()} for run in runs}
    series = {letter: {x: summary["mean"] for x, summary in values.items()} for letter, values in measured.items()}
    intervals = {
        letter: {x: (summary["low"], summary["high"]) for x, summary in values.items() if summary["low"] is not None}
        for letter, values in measured.items()
    }
    rings = {run.letter: (run.chosen, "chosen as the best") for run in runs if run.chosen is not None}
    note = f"share, with 95 % interval{'; ring: chosen as the best' if rings else ''}"
    svg = charts.lines_chart(
        series, name=curve.title, text=curve.text, low=curve.low, high=curve.high, intervals=intervals, rings=rings
    )
    return note, svg


def _in_groups(episodes: ScoredEpisodes, names: set[str]) -> EpisodeColumns:
    columns = episodes.columns
    return columns.take(columns.in_groups_N(names).nonzero()[0])


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} scenario{'' if len(names) == 1 else 's'}"


def render_policies(comparison: PoliciesComparison) -> str:
    """Return the page as HTML text."""
    policies = comparison.policies
    named = {f"{name} against {comparison.baseline}": paired for name, paired in comparison.success.items()}
    return page(
        "policies.html.j2",
        it=comparison,
        evaluations=[{"label": policy.name, "summary": policy.summary} for policy in policies],
        success={name: paired for name, paired in named.items() if paired is not None},
        reward={name: paired for name, paired in comparison.reward.items() if paired is not None},
        breakdowns=[
            {
                "title": title,
                "kinds": list(dict.fromkeys(kind for policy in policies for kind in policy.summary[name])),
                "rows": [(policy.name, policy.summary[name]) for policy in policies],
            }
            for name, title in BREAKDOWNS.items()
        ],
        errors=[
            {
                "policy": policy,
                "classes": [(error.name, len(error.places), _examples(policy, error)) for error in policy.errors],
            }
            for policy in policies
        ],
    )


def _examples(policy: PolicyResult, error: ErrorClass) -> list[dict[str, Any]]:
    examples = episodes_of(policy.episodes).rows(error.places[:EXAMPLES])
    return [view(episode, policy.scores.get(episode.id)) for episode in examples]
