"""The report of a run: one self-contained HTML page, without network, scripts or fonts of its own.

`Report` is plain data that a flow fills; `render` turns it into the page (`components.evaluation.page`). The
configuration is masked here as well, so that a secret does not reach the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.evaluation import examples, plots
from components.evaluation.format import duration, judgement, number, percent, points
from components.evaluation.page import page
from components.redaction import mask, mask_text
from components.trajectories.failures import FailureKind
from components.trajectories.schema import Score, Trajectory


@dataclass(frozen=True)
class Evaluation:
    """One policy, measured on held-out scenarios."""

    label: str
    """Which policy, in a word or two: `start`, `after SFT`, `after GRPO`."""
    summary: Mapping[str, Any]
    """What `components.evaluation.metrics.summarise` returns."""
    trajectories: Sequence[Trajectory] = ()
    """The episodes, with rewards joined on; examples are taken from them."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    """What the judge said of them, by their ids; shown with the examples."""


@dataclass(frozen=True)
class RewardTraining:
    """One training of a reward model. Accuracy is the share of held-out pairs whose better episode it scores higher."""

    model: int
    """Its number, from 1."""
    step: int
    """The round after which it was trained; 0 before the rounds."""
    examples: float | None
    """Pairs, or labelled episodes, that it learned from."""
    heldout_pairs: float | None
    accuracy: float | None
    """On episodes of the policy as it stood then; None where they have no pair."""
    before: float | None = None
    """On the same pairs, of the model before this training."""
    earlier: float | None = None
    """On the held-out pairs of earlier policies."""


@dataclass(frozen=True)
class SelectionRow:
    """What one filter has kept."""

    label: str
    """Where it stands in the run: `filter[3]`."""
    episodes: int
    kept: int
    scenarios: int
    """Those of which something was kept."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """How many by the name of the rule that dropped them."""


@dataclass(frozen=True)
class Finding:
    """What a guard has found."""

    rule: str
    """Its name: `length_drift`."""
    step: int
    """The round."""
    message: str
    episodes: Sequence[Mapping[str, str]] = ()
    """Those that show it best: `label`, `id`, `why`, `excerpt` of each."""


@dataclass(frozen=True)
class FailureRow:
    """Episodes of one stage that failed."""

    label: str
    """The stage: `collect[3]`."""
    kinds: Sequence[FailureKind]


@dataclass(frozen=True)
class StageRow:
    """One stage of the run."""

    label: str
    """Where it stands in the run: `round 3/train`."""
    stage: str
    status: str
    """`ran` or `cached`."""
    seconds: float
    """Time that it took in this run."""
    key: str
    digest: str
    cost: float = 0.0
    """What it cost in this run, in the currency of the prices."""
    unpriced: int = 0
    """Calls of judges that are not in the cost, because nobody knows their price."""


@dataclass(frozen=True)
class Origin:
    """One step on the way to the final checkpoint."""

    label: str
    """The training that made the checkpoint of this step: `train[3]`."""
    key: str
    made_of: Sequence[tuple[str, str]] = ()
    """Labels and keys of what it was trained on."""
    goes_on: str = ""
    """The checkpoints that it went on from, in words; empty for the first one."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What holds for this step and those before it, by name: reward, algorithm, the run that made it. Only what is not
    as in the step after it."""


@dataclass(frozen=True)
class Report:
    """Everything that the page shows. Parts that are empty are left out of it."""

    experiment: str
    run_id: str = ""
    created: str = ""
    """Date and time, as it is to be shown."""
    seed: int | None = None
    seconds: float | None = None
    """Wall-clock time of the run."""
    evaluations: Sequence[Evaluation] = ()
    """In the order in which the policies came about."""
    differences: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By title (`after GRPO against after SFT`): what `metrics.paired_difference` returns. The first one is told in the
    headline."""
    rounds: Sequence[Mapping[str, float]] = ()
    """Metrics of each round, from round 1; see `CURVES` and `TIMES` for the names that are plotted."""
    notes: Sequence[str] = ()
    """What was decided in the course of the run, each in a sentence: why it ended early, how the policy was chosen."""
    failures: Sequence[FailureRow] = ()
    """Of each stage with episodes that failed, in the order of the run."""
    selections: Sequence[SelectionRow] = ()
    """Of each filter, in the order of the run."""
    findings: Sequence[Finding] = ()
    """Of the guards, in the order in which they were found."""
    reward_models: Sequence[RewardTraining] = ()
    stages: Sequence[StageRow] = ()
    lineage: Sequence[Origin] = ()
    """What the final checkpoint was made from, the latest step first."""
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    export: str = ""
    """Where the exported model lies."""
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str = ""
    command: str = ""
    """The command that makes this run again."""


@dataclass(frozen=True)
class Curve:
    """How one metric of a round is drawn."""

    key: str
    title: str
    note: str
    text: plots.Format = number
    low: float | None = None
    high: float | None = None


CURVES = (
    Curve("reward", "Reward", "mean over the policy's own attempts"),
    Curve("success", "Success", "share of the round's training episodes", percent, 0.0, 1.0),
    Curve("second/success", "Second attempts", "share that succeeded, after a reflection", percent, 0.0, 1.0),
    Curve("other/success", "The other player", "share of the games that it won", percent, 0.0, 1.0),
    Curve("teacher/success", "The teacher", "share of its episodes that succeeded", percent, 0.0, 1.0),
    Curve("heldout_success", "Held-out success", "share of the held-out episodes, after the round", percent, 0.0, 1.0),
    Curve("kl", "KL to the reference", "nats a token, by algorithm.kl_estimator", low=0.0),
    Curve("kl_k1", "KL to the reference (k1)", "nats a token: mean of log policy - log reference"),
    Curve("entropy", "Entropy", "nats a token", low=0.0),
    Curve("sampled_tokens", "Sampled tokens", "mean of an episode", low=0.0),
    Curve("repetition", "Repetition", "share of the 3-grams of a message that repeat", percent, 0.0, 1.0),
    Curve("identical_within", "Same answers in a group", "pairs without success that say the same", percent, 0.0, 1.0),
    Curve("identical_between", "Same answers elsewhere", "the same, of pairs of scenarios", percent, 0.0, 1.0),
    Curve("spread", "Disagreement of judges", "mean standard deviation of their scores", low=0.0),
    Curve("turns", "Turns", "mean of an episode", low=0.0),
    Curve("grad_norm", "Gradient norm", "before clipping", low=0.0),
    Curve("clip_fraction", "Clipped tokens", "share with a ratio outside the clip range", percent, 0.0),
    Curve("tokens_per_s", "Training speed", "tokens a second", low=0.0),
)
"""The metrics of a round that are drawn; the rest stands in the table of figures."""
COMPONENTS = "components/"
"""What the metrics begin with that are parts of the reward."""
TIMES = {"collect": "collect_s", "judge": "judge_s", "filter": "filter_s", "train": "train_s"}
"""The stages of a round and the metrics that hold their seconds."""
_WIDE = 1060
"""Width of the chart of times: as wide as three of the others, so that its letters have the same size."""


def render(report: Report) -> str:
    """The page as HTML text."""
    return page(
        "report.html.j2",
        report=report,
        overrides=[mask_text(override) for override in report.overrides],
        config=_yaml(mask(dict(report.config))),
        headline=_headline(report),
        curves=_curves(report.rounds),
        times=_times(report.rounds),
        reward_accuracy=_reward_accuracy(report.reward_models),
        colours=plots.COLOURS,
        time_names=list(TIMES),
        figures=list(dict.fromkeys(key for values in report.rounds for key in values)),
        breakdowns=_breakdowns(report.evaluations),
        examples=examples.choose(report.evaluations),
        change=examples.before_and_after(report.evaluations),
        longest=max((row.seconds for row in report.stages), default=0.0),
    )


def _headline(report: Report) -> dict[str, str] | None:
    """The result in words: from where to where, and how sure that is."""
    measured = [item for item in report.evaluations if item.summary["success"]["mean"] is not None]
    if not measured:
        return None
    first, last = measured[0], measured[-1]
    found = {"label": last.label, "value": percent(last.summary["success"]["mean"]), "change": "", "verdict": ""}
    if first is not last:
        found["change"] = f"from {percent(first.summary['success']['mean'])} ({first.label})"
    if report.differences:
        title, difference = next(iter(report.differences.items()))
        shift = f"{title[:1].upper()}{title[1:]}: {points(difference['difference'])} points"
        if difference["low"] is None:
            found["verdict"] = f"{shift}, too few scenarios for an interval."
        else:
            interval = f"95 % interval {points(difference['low'])} to {points(difference['high'])}"
            found["verdict"] = f"{shift} ({interval}) on {difference['n']} scenarios: {judgement(difference)}."
    return found


def _curves(rounds: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    xs = list(range(1, len(rounds) + 1))
    found = []
    for curve in (*CURVES, *_parts(rounds)):
        ys = [values.get(curve.key) for values in rounds]
        svg = plots.line_chart(xs, ys, name=curve.title, text=curve.text, low=curve.low, high=curve.high) if xs else ""
        if svg:
            last = next(y for y in reversed(ys) if y is not None)
            found.append({"title": curve.title, "note": curve.note, "last": curve.text(last), "svg": svg})
    return found


def _parts(rounds: Sequence[Mapping[str, float]]) -> list[Curve]:
    """A curve for each part of a composed reward; what they are made of stands in the table of figures."""
    names = dict.fromkeys(key for values in rounds for key in values if key.startswith(COMPONENTS))
    parts = [name for name in names if "/" not in name.removeprefix(COMPONENTS)]
    note = "mean of this part of the reward, before its weight"
    return [Curve(name, name.removeprefix(COMPONENTS), note) for name in parts] if len(parts) > 1 else []


def _times(rounds: Sequence[Mapping[str, float]]) -> str:
    xs = list(range(1, len(rounds) + 1))
    series = {name: [float(values.get(key, 0.0)) for values in rounds] for name, key in TIMES.items()}
    return plots.stacked_bars(xs, series, name="Time by stage", text=duration, width=_WIDE) if xs else ""


def _reward_accuracy(trainings: Sequence[RewardTraining]) -> dict[str, Any] | None:
    """A line for each reward model; None where they were trained only once."""
    series: dict[str, dict[int, float | None]] = {}
    for one in trainings:
        series.setdefault(f"model {one.model}", {})[one.step] = one.accuracy
    if all(len(line) < 2 for line in series.values()):
        return None
    svg = plots.lines_chart(series, name="Held-out accuracy of reward models", text=percent, low=0.0, high=1.0)
    return {"svg": svg, "labels": list(series)} if svg else None


def _breakdowns(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Success by type and by difficulty: a row for each, a cell for each evaluation (None where it has no episode)."""
    found = []
    for title, part in (("By type of task", "by_type"), ("By difficulty", "by_difficulty")):
        names = list(dict.fromkeys(name for item in evaluations for name in item.summary.get(part, {})))
        if len(names) > 1 or (names and names[0] not in ("", "0")):
            rows = [(name, [item.summary.get(part, {}).get(name) for item in evaluations]) for name in names]
            found.append({"title": title, "rows": rows})
    return found


def _yaml(data: Any) -> str:
    import yaml

    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110) if data else ""
