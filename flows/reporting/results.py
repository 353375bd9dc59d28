"""Results of a run: what it measured, as tables and as the JSON line."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from components.evaluation.metrics import interval_of
from components.pages.report import HeldoutAnswer
from components.trajectories.schema import Trajectory
from flows.execution.executor import Execution
from flows.experiment.guards import RULES
from flows.recipes.outcome import RunOutcome
from flows.reporting.report import (
    EvaluationResults,
    heldout_answers,
    heldout_metrics,
    load_evaluations,
    model_folder,
    report_of,
    stopped_evaluations,
    summary_of,
)
from flows.stages import STAGES

EPISODE_COLUMNS = ("policy", "success", "reward", "turns")


@dataclass(frozen=True)
class ReleaseResult:
    """Registration, champion decision and deployment of a trained policy."""

    policy_digest: str | None = None
    """sha256 over the tensors of the final adapter; None if nothing was trained."""
    model: str | None = None
    """Name and version in the model registry; None if nothing was exported."""
    champion: dict[str, Any] | None = None
    """Champion decision on that version (`flows.release.champion.Decision`)."""
    deployment: dict[str, Any] | None = None
    """State, URL, model and agreement of the deployment; None without `deploy.target`."""
    notices: tuple[str, ...] = ()
    """Messages about the decisions."""


class ResultTable(NamedTuple):
    """Table of results."""

    key: str
    """Kind of the table, for names of artifacts."""
    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


@dataclass(frozen=True)
class Results:
    """Result of a run."""

    run_id: str
    summaries: dict[str, dict[str, Any]]
    """Results of `components.evaluation.metrics.summarise` by `start`, `sft`, `feedback`, `final`, as far as they
    exist; empty without an environment."""
    titles: dict[str, str]
    """Titles of the evaluated policies, with the same keys."""
    differences: dict[str, dict[str, Any]]
    """Results of `components.evaluation.metrics.paired_difference` by title."""
    episodes: int
    """Number of episodes behind this result, in training and evaluation, cached ones included."""
    seconds: float
    """Duration of the run."""
    stages: dict[str, str]
    """Status by label: `ran` or `cached`."""
    report: str
    export: str | None = None
    release: ReleaseResult = field(default_factory=ReleaseResult)
    seed: int = 0
    peak_memory_gb: float = 0.0
    """Largest resident memory of this process so far, in GB (10^9 bytes)."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that each kind of stage took in this run."""
    cached_seconds: float = 0.0
    """Seconds that the cached stages took when they were computed: what this run saved."""
    step: int = 0
    """Round of the final policy; 0 is the start of the rounds."""
    rounds: int = 0
    """Last round that was played."""
    in_rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Summaries of the evaluations after rounds, by round."""
    training_rewards: dict[int, float | None] = field(default_factory=dict)
    """Mean training reward by round, of the rounds that the last reward models scored; None if unknown."""
    guards: list[dict[str, Any]] = field(default_factory=list)
    """Guards that triggered: `guard`, `step`, `message`."""
    reported: dict[str, float] = field(default_factory=dict)
    """Numbers that the recipe reports, by name."""
    passes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """pass@k and pass^k of the last evaluation (`components.evaluation.metrics.pass_at_k`), with `evaluate.samples`
    above 1."""
    samples: int = 1
    """Episodes per held-out scenario."""
    notices: list[str] = field(default_factory=list)
    """Reasons for early stopping, for the selection of the final policy, and messages about its release."""
    stopped: bool = False
    """True if the rounds stopped early."""
    pruned: str | None = None
    """Reason why the run's sweep pruned it; None if it did not."""
    cost: float = 0.0
    """Cost of all stages in this run, for judges and machines, in the currency of their prices."""
    unpriced_calls: int = 0
    """Number of judge calls that are not in the cost because their price is unknown."""

    heldout: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics of held-out rows of imported data (`components.algorithms.likelihood.summary`), `before` and `after` the
    training on it."""
    answers: list[HeldoutAnswer] = field(default_factory=list)
    """Answers to prompts of held-out rows."""

    @property
    def last(self) -> dict[str, Any] | None:
        """Summary of the last evaluation; None without one."""
        return list(self.summaries.values())[-1] if self.summaries else None

    def to_json(self) -> str:
        """Return the result line, the last line on stdout."""
        return json.dumps(
            {
                "run_id": self.run_id,
                "policy_digest": self.release.policy_digest,
                **_measure("success", self.last),
                **_measure("success", self.summaries.get("start"), "_start"),
                **_measure("success", self.summaries.get("sft"), "_sft"),
                **_measure("success", self.summaries.get("feedback"), "_feedback"),
                **_gain(self.differences, self.titles),
                **({"sequence": self.last["sequence"]} if self.last and "sequence" in self.last else {}),
                **_measure("reward", self.last),
                **self._legality(),
                **{
                    f"{name}{suffix}": self.heldout.get(key, {}).get(name)
                    for name in ("loss", "accuracy")
                    for key, suffix in (("after", ""), ("before", "_before"))
                },
                **({"samples": self.samples} if self.passes else {}),
                **{name: value for measure in self.passes for name, value in _measure(measure, self.passes).items()},
                "step": self.step,
                "rounds": self.rounds,
                "stopped_early": self.stopped,
                "pruned": self.pruned,
                "success_by_round": {str(n): summary["success"]["mean"] for n, summary in self.in_rounds.items()},
                "training_reward_by_round": {str(n): reward for n, reward in self.training_rewards.items()},
                "guards": self.guards,
                "reported": self.reported,
                "seed": self.seed,
                "episodes": self.episodes,
                "seconds": round(self.seconds, 2),
                "stage_seconds": self.stage_seconds,
                "cached_seconds": self.cached_seconds,
                "cost": round(self.cost, 6),
                "unpriced_calls": self.unpriced_calls,
                "peak_memory_gb": self.peak_memory_gb,
                "stages": self.stages,
                "export": self.export,
                "model": self.release.model,
                "champion": self.release.champion,
                "deployment": self.release.deployment,
                "report": self.report,
            }
        )

    def _legality(self) -> dict[str, Any]:
        """Return the share of episodes with an invalid action and the success of the others, for the final policy and
        for that at the start of the rounds; empty where the environment does not count invalid actions."""
        starts = [self.summaries[name] for name in ("start", "sft", "feedback") if name in list(self.summaries)[:-1]]
        counted = [summary for summary in (self.last, *starts[-1:]) if summary and summary.get("invalid", {}).get("n")]
        if len(counted) < 2:
            return {}
        return {
            f"{name}{suffix}": summary[name]["mean"]
            for summary, suffix in zip(counted, ("", "_before"), strict=True)
            for name in ("invalid", "valid_success")
        }

    def rows(self) -> list[list[str]]:
        """Return the final table's rows: policy, success, reward, turns, with 95 % intervals. The last row is the final
        policy's."""
        policies = [(self.titles[name], summary) for name, summary in self.summaries.items()]
        policies[-1:-1] = [(f"round {n}", summary) for n, summary in self.in_rounds.items() if n != self.step]
        return [
            [title, *(with_interval(summary[measure]) for measure in ("success", "reward", "turns"))]
            for title, summary in policies
        ]

    def differences_text(self) -> list[str]:
        """Return the paired differences as text, one line each, and the ends of evaluations that may stop early."""
        return [
            f"{title}: success {paired['difference']:+.3f} {interval(paired)} on the same {paired['n']} scenarios, "
            f"{len(paired['improved'])} better, {len(paired['regressed'])} worse"
            for title, paired in self.differences.items()
        ] + stopped_evaluations(self.titles, self.summaries)

    def tables(self) -> list[ResultTable]:
        """Return the tables of held-out episodes and of held-out rows, those that have rows."""
        played = ResultTable("results", "held-out episodes, mean [95 % interval]", EPISODE_COLUMNS, self.rows())
        return [table for table in (played, heldout_table(self.heldout)) if table.rows]

    def markdown(self) -> str:
        """Return the results as Markdown for Prefect's UI."""
        link = self.report if "://" in self.report else f"file://{self.report}"
        lines = []
        for table in self.tables():
            lines += ["| " + " | ".join(map(str.capitalize, table.columns)) + " |", "|---" * len(table.columns) + "|"]
            lines += [*("| " + " | ".join(row) + " |" for row in table.rows), ""]
        lines += [f"- {text}" for text in [*self.differences_text(), *self.notices]]
        return "\n".join([*lines, "", f"[Report]({link}), MLflow run `{self.run_id}`"])


def conclude(
    execution: Execution,
    outcome: RunOutcome,
    overrides: Sequence[str],
    release: ReleaseResult,
    *,
    seconds: float,
    command: Sequence[str] | None = None,
) -> Results:
    """Log the report and the run's totals; return the results. seconds: duration of the run so far. command: that of
    the run; None: `flows.run` with the overrides."""
    tracker = execution.tracker
    assert tracker is not None
    evaluations = load_evaluations(execution.spec, outcome)
    report = tracker.log_report(report_of(execution, outcome, evaluations, overrides, seconds, command=command))
    export = str(model_folder(outcome.export)) if outcome.export else None
    results = results_of(
        execution, outcome, evaluations, tracker.run_id, release, seconds=seconds, report=report, export=export
    )
    tracker.log_metrics({f"recipe/{name}": value for name, value in outcome.reported.items()}, outcome.last_step)
    passes = {f"eval/{name}": value["mean"] for name, value in results.passes.items() if value["mean"] is not None}
    tracker.log_metrics(passes, outcome.last_step)
    tracker.log_metrics({"time/total": seconds, "cost/total": results.cost}, outcome.last_step)
    tracker.set_tags({"final_step": str(outcome.step), **({"pruned": "true"} if outcome.pruned else {})})
    return results


def results_of(
    execution: Execution,
    outcome: RunOutcome,
    evaluations: EvaluationResults,
    run_id: str,
    release: ReleaseResult,
    *,
    seconds: float,
    report: str,
    export: str | None,
) -> Results:
    """Return the results of a run: its evaluations, the times of its stages, and the release of its export."""
    return Results(
        run_id=run_id,
        summaries=evaluations.summaries,
        titles=evaluations.titles,
        differences=evaluations.differences,
        episodes=_played(execution),
        seconds=seconds,
        stages={label: done.status for label, done in execution.done.items()},
        report=report,
        export=export,
        release=release,
        seed=execution.spec.seed,
        peak_memory_gb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        stage_seconds=_stage_seconds(execution),
        cached_seconds=_cached_seconds(execution),
        step=outcome.step,
        rounds=outcome.last_step,
        in_rounds={
            measured.step: summary_of(measured.evaluation)
            for measured in outcome.measured
            if measured.step != outcome.first_step
        },
        training_rewards=outcome.training_rewards,
        guards=[
            {"guard": notice.kind, "step": notice.step, "message": notice.message}
            for notice in execution.notices
            if notice.kind in RULES
        ],
        reported=outcome.reported,
        passes=passes_of(list(evaluations.episodes.values())[-1], execution.spec.evaluate.samples)
        if evaluations.episodes
        else {},
        samples=execution.spec.evaluate.samples,
        notices=[*outcome.decisions, *release.notices],
        stopped=outcome.stopped is not None,
        pruned=outcome.pruned,
        cost=sum(done.cost for done in execution.done.values()),
        unpriced_calls=sum(done.unpriced for done in execution.done.values()),
        heldout=heldout_metrics(outcome),
        answers=heldout_answers(outcome),
    )


def heldout_table(heldout: Mapping[str, Mapping[str, float]]) -> ResultTable:
    """Return the table of held-out rows. heldout: metrics by `before` and `after` the training."""
    measured = [name for name in ("loss", "accuracy") if any(name in metrics for metrics in heldout.values())]
    rows = [
        [f"{label} training", *(f"{metrics[name]:.3f}" if name in metrics else "–" for name in measured)]
        for label, metrics in heldout.items()
    ]
    title = "held-out rows of the data: loss in nats per token, accuracy of pairs"
    return ResultTable("held-out-rows", title, ("policy", *measured), rows)


def passes_of(episodes: Sequence[Trajectory], samples: int) -> dict[str, dict[str, Any]]:
    """Return pass@k and pass^k with k samples, with intervals over scenarios; empty for one sample."""
    from components.evaluation.metrics import pass_at_k

    if samples == 1:
        return {}
    passes = pass_at_k(episodes, samples)
    return {name: passes[name] for name in ("pass_at_k", "pass_hat_k")}


def _played(execution: Execution) -> int:
    """Return the number of episodes of all stages, each artifact counted once. Second attempts, continuations and
    episodes of other players count, too."""
    artifacts = {done.artifact.key: done.artifact for done in execution.done.values()}
    return sum(
        int(count)
        for artifact in artifacts.values()
        if STAGES[artifact.stage].plays
        for name, count in artifact.metrics.items()
        if name.rpartition("/")[2] == "episodes"
    )


def _measure(name: str, summary: dict[str, Any] | None, suffix: str = "") -> dict[str, Any]:
    measure = summary[name] if summary else {"mean": None, "low": None, "high": None}
    return {f"{name}{suffix}": measure["mean"], f"{name}{suffix}_interval": interval_of(measure)}


def _gain(differences: dict[str, dict[str, Any]], titles: dict[str, str]) -> dict[str, Any]:
    """Return the success of the final policy minus that of the policy at the start of the rounds, on the same
    scenarios."""
    starts = [titles[name] for name in ("start", "sft", "feedback") if name in list(titles)[:-1]]
    paired = next((paired for title, paired in differences.items() if title.endswith(f" against {starts[-1]}")), None)
    if paired is None:
        return {"gain": None, "gain_interval": None}
    return {"gain": paired["difference"], "gain_interval": interval_of(paired)}


def _stage_seconds(execution: Execution) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for done in execution.done.values():
        seconds[done.artifact.stage] = round(seconds.get(done.artifact.stage, 0.0) + done.seconds, 2)
    return seconds


def with_interval(measure: Mapping[str, Any]) -> str:
    """Return a measure with its 95 % interval, `0.500 [0.250, 0.750]`, or a dash if nothing was measured."""
    return "–" if measure["mean"] is None else f"{measure['mean']:.3f} {interval(measure)}".rstrip()


def interval(measure: Mapping[str, Any]) -> str:
    """Return a measure's interval, `[0.250, 0.750]`, or an empty text if it has none."""
    return "" if measure["low"] is None else f"[{measure['low']:.3f}, {measure['high']:.3f}]"


def _cached_seconds(execution: Execution) -> float:
    """Return the seconds that the cached stages took when they were computed, each artifact counted once."""
    cached = {done.artifact.key: done.artifact.seconds for done in execution.done.values() if done.status == "cached"}
    return round(sum(cached.values()), 2)
