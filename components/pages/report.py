"""Report of a run as one self-contained HTML page, without network access, scripts or web fonts.

`Report` is plain data that a flow fills; `render` turns it into the page, with the secrets of the
configuration masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.evaluation.metrics import CONFIDENCE
from components.pages import charts, episodes
from components.pages.page import COLOURS, duration, judgement, number, page, percent, points
from components.trajectories.failures import FailureKind
from components.trajectories.schema import Score, Trajectory


@dataclass(frozen=True)
class Evaluation:
    """One policy, measured on held-out scenarios."""

    label: str
    """Short name of the policy: `start`, `after SFT`, `after GRPO`."""
    summary: Mapping[str, Any]
    """Result of `components.evaluation.metrics.summarise`."""
    trajectories: Sequence[Trajectory] = ()
    """Episodes with their rewards; examples are chosen from them."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    """Judge's scores by trajectory id; shown with the examples."""


@dataclass(frozen=True)
class HeldoutAnswer:
    """Greedy answers of the policy to the prompt of a held-out row."""

    prompt: str
    """Last message before the answer."""
    reference: str
    """Answer of the data."""
    before: str
    """Answer before the training on the data."""
    after: str


@dataclass(frozen=True)
class RewardTraining:
    """One training of a reward model. Accuracy is the share of held-out pairs in which it ranks the better episode
    higher."""

    model: int
    """Number of the model, from 1."""
    step: int
    """Round after which it was trained; 0: before the rounds."""
    examples: float | None
    """Number of training pairs or labelled episodes."""
    heldout_pairs: float | None
    accuracy: float | None
    """Accuracy on episodes of the policy at that round; None if they form no pair."""
    before: float | None = None
    """Accuracy on the same pairs before this training."""
    earlier: float | None = None
    """Accuracy on the held-out pairs of earlier policies."""
    epochs: Sequence[tuple[float | None, float | None]] = ()
    """Accuracy of each epoch: on the training pairs as they were read, and on held-out pairs at its end."""
    calibration: Sequence[Mapping[str, float]] = ()
    """Bins of held-out pairs: `predicted` probability, `observed` share, number of `pairs`."""
    calibration_error: float | None = None
    """Mean difference of the two, by pairs."""


@dataclass(frozen=True)
class SelectionRow:
    """Counts of the episodes that one filter stage kept and dropped."""

    label: str
    """Label of the stage: `filter[3]`."""
    episodes: int
    kept: int
    scenarios: int
    """Scenarios with at least one kept episode."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Count of dropped episodes by the name of the rule."""


@dataclass(frozen=True)
class Finding:
    """Finding of a guard."""

    rule: str
    """Name of the rule: `length_drift`."""
    step: int
    """Round of the finding."""
    message: str
    episodes: Sequence[Mapping[str, str]] = ()
    """Clearest examples, each with `label`, `id`, `why` and `excerpt`."""


@dataclass(frozen=True)
class FailureRow:
    """Failed episodes of one stage."""

    label: str
    """Label of the stage: `collect[3]`."""
    kinds: Sequence[FailureKind]


@dataclass(frozen=True)
class StageRow:
    """One stage of the run."""

    label: str
    """Label of the stage: `round 3/train`."""
    status: str
    """`ran` or `cached`."""
    seconds: float
    """Duration in this run."""
    key: str
    digest: str
    cost: float = 0.0
    """Cost in this run, in the currency of the prices."""
    unpriced: int = 0
    """Judge calls that the cost does not include, because their price is unknown."""


@dataclass(frozen=True)
class Origin:
    """One training step in the lineage of the final checkpoint."""

    label: str
    """Label of the training stage that wrote the checkpoint: `train[3]`."""
    key: str
    made_of: Sequence[tuple[str, str]] = ()
    """Labels and keys of the artifacts that it was trained on."""
    goes_on: str = ""
    """Description of the checkpoints from which training continued; empty for the first step."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Properties of this step and the earlier ones, by name: reward, algorithm, run. Only those that differ from the
    following step."""


@dataclass(frozen=True)
class Report:
    """Content of the page. Empty parts are left out."""

    experiment: str
    run_id: str = ""
    created: str = ""
    """Date and time, formatted for display."""
    seed: int | None = None
    seconds: float | None = None
    """Wall-clock time of the run."""
    evaluations: Sequence[Evaluation] = ()
    """Evaluations in chronological order."""
    heldout: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of held-out rows of the data (`components.algorithms.likelihood.summary`), `before` and `after` the
    training on it."""
    answers: Sequence[HeldoutAnswer] = ()
    """Answers to prompts of held-out rows."""
    differences: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Results of `metrics.paired_difference` by title (`after GRPO against after SFT`). The headline shows the first
    one."""
    rounds: Sequence[Mapping[str, float]] = ()
    """Metrics of each round, from round 1; see `CURVES` for the names that are plotted."""
    round_stages: Sequence[str] = ()
    """Stages whose times in the rounds are plotted: the metric `NAME_s` of a round, in seconds."""
    notes: Sequence[str] = ()
    """Decisions made during the run, one sentence each, such as early stopping or the selection of the policy."""
    failures: Sequence[FailureRow] = ()
    """Stages with failed episodes, in the order of the run."""
    limits: Sequence[tuple[str, str]] = ()
    """Stages whose episodes a limit shaped, each with a sentence, in the order of the run."""
    selections: Sequence[SelectionRow] = ()
    """Filter stages, in the order of the run."""
    findings: Sequence[Finding] = ()
    """Findings of the guards, in chronological order."""
    reward_models: Sequence[RewardTraining] = ()
    stages: Sequence[StageRow] = ()
    lineage: Sequence[Origin] = ()
    """Training steps that led to the final checkpoint, latest first."""
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    export: str = ""
    """Path of the exported model."""
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str = ""
    command: str = ""
    """Command that reproduces this run."""


@dataclass(frozen=True)
class Curve:
    """Plot of one metric over the rounds."""

    key: str
    title: str
    note: str
    text: charts.Format = number
    low: float | None = None
    high: float | None = None


CURVES = (
    Curve("reward", "Reward", "mean over the policy's own attempts"),
    Curve("success", "Success", "share of the round's training episodes", percent, 0.0, 1.0),
    Curve("second/success", "Second attempts", "share that succeeded, after a reflection", percent, 0.0, 1.0),
    Curve("other/success", "Opponent", "share of games won by the opponent", percent, 0.0, 1.0),
    Curve("teacher/success", "Teacher", "share of the teacher's episodes that succeeded", percent, 0.0, 1.0),
    Curve("heldout_success", "Held-out success", "share of the held-out episodes, after the round", percent, 0.0, 1.0),
    Curve("kl", "KL to the reference", "nats per token, by algorithm.kl_estimator", low=0.0),
    Curve("kl_k1", "KL to the reference (k1)", "nats per token: mean of log policy - log reference"),
    Curve("entropy", "Entropy", "nats per token", low=0.0),
    Curve("sampled_tokens", "Sampled tokens", "mean per episode", low=0.0),
    Curve("repetition", "Repetition", "share of the 3-grams of a message that repeat", percent, 0.0, 1.0),
    Curve(
        "identical_within", "Identical answers in a group", "share of pairs, except both successful", percent, 0.0, 1.0
    ),
    Curve("identical_between", "Identical answers between scenarios", "same, of pairs of scenarios", percent, 0.0, 1.0),
    Curve("spread", "Disagreement of judges", "mean standard deviation of their scores", low=0.0),
    Curve("judge_shift", "Judge drift", "mean shift of the scores of the same episodes since the first judgement"),
    Curve("judge_flips", "Judge flips", "share of pairs of the same episodes in another order", percent, 0.0, 1.0),
    Curve("turns", "Turns", "mean per episode", low=0.0),
    Curve("grad_norm", "Gradient norm", "before clipping", low=0.0),
    Curve("clip_fraction", "Clipped tokens", "share with a ratio outside the clip range", percent, 0.0),
    Curve("tokens_per_s", "Training speed", "tokens per second", low=0.0),
)
"""Metrics of a round that are plotted; the others are in the table of metrics."""
COMPONENTS = "components/"
"""Prefix of the metrics that are components of the reward."""
_WIDE = 1060
"""Width of the time chart: three times that of the others, so that its labels have the same size."""


def render(report: Report) -> str:
    """Return the page as HTML text."""
    return page(
        "report.html.j2",
        report=report,
        headline=_headline(report),
        curves=[*_curves(report.rounds), *_times(report.rounds, report.round_stages)],
        reward_accuracy=_reward_accuracy(report.reward_models),
        reward_calibration=_reward_calibration(report.reward_models),
        figures=list(dict.fromkeys(key for values in report.rounds for key in values)),
        breakdowns=_breakdowns(report.evaluations),
        examples=episodes.choose(report.evaluations),
        change=episodes.before_and_after(report.evaluations),
        longest=max((row.seconds for row in report.stages), default=0.0),
    )


def _headline(report: Report) -> dict[str, str] | None:
    """Return the headline texts: final success, change since the start, and the verdict with its interval."""
    measured = [item for item in report.evaluations if item.summary["success"]["mean"] is not None]
    if not measured:
        return None
    first, last = measured[0], measured[-1]
    headline = {"label": last.label, "value": percent(last.summary["success"]["mean"]), "change": "", "verdict": ""}
    if first is not last:
        compared = next(iter(report.differences), "").partition(" against ")[2]  # the verdict's baseline comes first
        before = [item for item in measured[:-1] if item.label == compared]
        before += [first] if first not in before else []
        texts = (f"{percent(item.summary['success']['mean'])} ({item.label})" for item in before)
        headline["change"] = f"from {', '.join(texts)}"
    if report.differences:
        title, difference = next(iter(report.differences.items()))
        shift = f"{title[:1].upper()}{title[1:]}: {points(difference['difference'])} points"
        if difference["low"] is None:
            headline["verdict"] = f"{shift}, too few scenarios for an interval."
        else:
            level = f"{100 * difference.get('confidence', CONFIDENCE):.4g}"
            interval = f"{level} % interval {points(difference['low'])} to {points(difference['high'])}"
            headline["verdict"] = f"{shift} ({interval}) on {difference['n']} scenarios: {judgement(difference)}."
    return headline


def _curves(rounds: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the charts of the metrics over the rounds, as the templates draw them (`chart`)."""
    xs = list(range(1, len(rounds) + 1))
    drawn = []
    for curve in (*CURVES, *_parts(rounds)):
        ys = [values.get(curve.key) for values in rounds]
        svg = charts.line_chart(xs, ys, name=curve.title, text=curve.text, low=curve.low, high=curve.high) if xs else ""
        if svg:
            last = next(y for y in reversed(ys) if y is not None)
            drawn.append({"title": curve.title, "note": curve.note, "now": curve.text(last), "svg": svg})
    return drawn


def _parts(rounds: Sequence[Mapping[str, float]]) -> list[Curve]:
    """Return a curve for each component of a composed reward. Nested components are only in the table of metrics."""
    names = dict.fromkeys(key for values in rounds for key in values if key.startswith(COMPONENTS))
    parts = [name for name in names if "/" not in name.removeprefix(COMPONENTS)]
    note = "mean of this reward component, before weighting"
    return [Curve(name, name.removeprefix(COMPONENTS), note) for name in parts] if len(parts) > 1 else []


def _times(rounds: Sequence[Mapping[str, float]], stages: Sequence[str]) -> list[dict[str, Any]]:
    """Return the chart of the stages' times, if any is known."""
    xs = list(range(1, len(rounds) + 1))
    series = {name: [float(values.get(f"{name}_s", 0.0)) for values in rounds] for name in stages}
    svg = charts.stacked_bars(xs, series, name="Time by stage", text=duration, width=_WIDE) if xs else ""
    legend = [(f"s{index}", name) for index, name in enumerate(stages)]
    return [{"title": "Time by stage", "svg": svg, "legend": legend, "wide": True}] if svg else []


def _reward_accuracy(trainings: Sequence[RewardTraining]) -> dict[str, Any] | None:
    """Return a chart with a line per reward model; None if each was trained only once."""
    series: dict[str, dict[int, float | None]] = {}
    for training in trainings:
        series.setdefault(f"model {training.model}", {})[training.step] = training.accuracy
    if all(len(line) < 2 for line in series.values()):
        return None
    svg = charts.lines_chart(series, name="Held-out accuracy of reward models", text=percent, low=0.0, high=1.0)
    legend = [(f"r{index % COLOURS}", label) for index, label in enumerate(series)]
    note = "on episodes of the policy after the round"
    return {"title": "Held-out accuracy", "note": note, "svg": svg, "legend": legend} if svg else None


def _reward_calibration(trainings: Sequence[RewardTraining]) -> list[dict[str, Any]]:
    """Return a chart for each training with held-out pairs: observed share by predicted probability."""
    drawn = [training for training in trainings if training.calibration]
    return [
        {
            "title": f"Calibration of model {training.model}, step {training.step}",
            "note": f"share of held-out pairs ranked right by predicted probability; mean difference "
            f"{percent(training.calibration_error)}",
            "svg": charts.preference_chart(training.calibration),
            "legend": [],
        }
        for training in drawn
    ]


def _breakdowns(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return success by type and by difficulty: a row for each, a cell per evaluation (None if it has no episode)."""
    breakdowns = []
    for title, part in (("By type of task", "by_type"), ("By difficulty", "by_difficulty")):
        names = list(dict.fromkeys(name for item in evaluations for name in item.summary.get(part, {})))
        if len(names) > 1 or (names and names[0] not in ("", "0")):
            rows = [(name, [item.summary.get(part, {}).get(name) for item in evaluations]) for name in names]
            breakdowns.append({"title": title, "rows": rows})
    return breakdowns
