"""What a run says of itself: the line of a round, the table at the end, the JSON line."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.artifacts import Artifact
from flows.execution.executor import Execution
from flows.recipes.outcome import Outcome
from flows.reporting.report import evaluated, model_folder, report_of, round_figures, summary_of
from flows.stages import selections
from flows.terminal.console import Console, duration


@dataclass(frozen=True)
class ReleaseResult:
    """Registration, champion decision and deployment of a trained policy."""

    policy_digest: str | None = None
    """sha256 over the tensors of the final adapter; None where nothing was trained."""
    model: str | None = None
    """Name and version in the model registry; None where nothing was exported."""
    champion: dict[str, Any] | None = None
    """The decision whether that version is champion (`flows.release.champion.Decision`)."""
    deployment: dict[str, Any] | None = None
    """State, URL, model and agreement of the deployment; None without `deploy.target`."""
    notices: tuple[str, ...] = ()
    """The decisions in words."""


@dataclass(frozen=True)
class Results:
    """The result of a run."""

    run_id: str
    policy_digest: str | None
    """sha256 over the tensors of the final adapter; None where nothing was trained."""
    summaries: dict[str, dict[str, Any]]
    """Of `start`, `sft`, `final`, as far as there are: what `components.evaluation.metrics.summarise` returns."""
    titles: dict[str, str]
    differences: dict[str, dict[str, Any]]
    """By title: what `components.evaluation.metrics.paired_difference` returns."""
    episodes: int
    """Played for this result, in training and evaluation, now or earlier."""
    seconds: float
    stages: dict[str, str]
    """Label to `ran` or `cached`."""
    report: str
    export: str | None = None
    model: str | None = None
    """Name and version in the model registry."""
    champion: dict[str, Any] | None = None
    """Whether that version is champion, and why (`flows.release.champion.Decision`)."""
    deployment: dict[str, Any] | None = None
    """State, URL, model and agreement of the deployment; None without `deploy.target`."""
    seed: int = 0
    peak_memory_gb: float = 0.0
    """Largest resident memory of this process so far, in GB (10^9 bytes)."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Time that each kind of stage took in this run."""
    step: int = 0
    """The round after which the final policy stood; 0 at the start of the rounds."""
    rounds: int = 0
    """The last round that was played."""
    in_rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Summaries of the evaluations after rounds, by round."""
    notices: list[str] = field(default_factory=list)
    """Why the rounds ended before their number, and how the final policy was chosen."""
    stopped: bool = False
    """Whether the rounds ended before their number."""
    pruned: str | None = None
    """Why the sweep that the run belongs to ended it before its time."""
    cost: float = 0.0
    """Of all stages in this run: judges and machines, in the currency of their prices."""
    unpriced_calls: int = 0
    """Calls of judges that are not in the cost, because nobody knows their price."""

    @property
    def last(self) -> dict[str, Any]:
        return list(self.summaries.values())[-1]

    def to_json(self) -> str:
        """The last line on stdout."""
        return json.dumps(
            {
                "run_id": self.run_id,
                "policy_digest": self.policy_digest,
                **_measure("success", self.last),
                **_measure("success", self.summaries.get("start"), "_start"),
                **_measure("success", self.summaries.get("sft"), "_sft"),
                **_measure("success", self.summaries.get("feedback"), "_feedback"),
                **_gain(self.differences),
                **_measure("reward", self.last),
                "step": self.step,
                "rounds": self.rounds,
                "stopped_early": self.stopped,
                "pruned": self.pruned,
                "success_by_round": {str(n): one["success"]["mean"] for n, one in self.in_rounds.items()},
                "seed": self.seed,
                "episodes": self.episodes,
                "seconds": round(self.seconds, 2),
                "stage_seconds": self.stage_seconds,
                "cost": round(self.cost, 6),
                "unpriced_calls": self.unpriced_calls,
                "peak_memory_gb": self.peak_memory_gb,
                "stages": self.stages,
                "export": self.export,
                "model": self.model,
                "champion": self.champion,
                "deployment": self.deployment,
                "report": self.report,
            }
        )

    def rows(self) -> list[list[str]]:
        """The table at the end: policy, success, reward, turns, with 95 % intervals. The last row is the final one."""
        shown = [(self.titles[name], summary) for name, summary in self.summaries.items()]
        shown[-1:-1] = [(f"round {n}", summary) for n, summary in self.in_rounds.items() if n != self.step]
        return [
            [title, *(with_interval(summary[measure]) for measure in ("success", "reward", "turns"))]
            for title, summary in shown
        ]

    def differences_text(self) -> list[str]:
        """The paired differences in words."""
        return [
            f"{title}: success {found['difference']:+.3f} {interval(found)} on the same {found['n']} scenarios, "
            f"{len(found['improved'])} better, {len(found['regressed'])} worse"
            for title, found in self.differences.items()
        ]

    def markdown(self) -> str:
        """For Prefect's UI."""
        link = self.report if "://" in self.report else f"file://{self.report}"
        head = ["| Policy | Success | Reward | Turns |", "|---|---|---|---|"]
        rows = ["| " + " | ".join(row) + " |" for row in self.rows()]
        lines = [*head, *rows, "", *(f"- {text}" for text in [*self.differences_text(), *self.notices])]
        return "\n".join([*lines, "", f"[Report]({link}), MLflow run `{self.run_id}`"])


def round_teller(execution: Execution) -> Callable[[int, dict[str, Artifact]], None]:
    """Says one line about each finished round."""

    def tell(number: int, artifacts: dict[str, Artifact]) -> None:
        row = round_figures(artifacts)
        done = {stage: execution.done[f"{stage}[{number}]"] for stage in artifacts}
        more = [one for label, one in execution.done.items() if f"[{number}+" in label]
        parts = [f"round {number}/{execution.spec.rounds}"]
        parts += [f"{title} {row[name]:{form}}" for name, title, form in _ROUND if name in row]
        if "skipped" in row:
            parts.append("nothing to learn from: no training")
        filters = [one.artifact.metrics for one in (*done.values(), *more) if one.artifact.stage == "filter"]
        if text := selections.told(selections.total(filters)):
            parts.append(text)
        if more:
            parts.append(f"{sum(one.artifact.stage == 'collect' for one in more)} refilled")
        if all(one.status == "cached" for one in (*done.values(), *more)):
            parts.append("cached")
        else:
            total = sum(one.waited for one in (*done.values(), *more))
            each = ", ".join(f"{stage} {one.seconds:.1f}" for stage, one in done.items())
            parts.append(f"{duration(total)} ({each})")
        execution.console.line("  ".join(parts))
        if execution.tracker is not None:
            tracker, seconds = execution.tracker, sum(one.waited for one in (*done.values(), *more))
            tracker.outbox.put(lambda: tracker.log_metrics({"time/round": seconds}, number))

    return tell


_ROUND = (
    ("reward", "reward", ".3f"),
    ("success", "success", ".3f"),
    ("second/success", "second attempts", ".3f"),
    ("other/success", "other player", ".3f"),
    ("teacher/success", "teacher", ".3f"),
    ("kl", "KL", ".4f"),
    ("kl_k1", "KL by k1", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("margin", "margin", ".3f"),
    ("accuracy", "accuracy", ".2f"),
    ("sampling_tokens_per_s", "tokens/s sampled", ".0f"),
    ("tokens_per_s", "trained", ".0f"),
)


def conclude(
    execution: Execution,
    outcome: Outcome,
    overrides: Sequence[str],
    release: ReleaseResult,
    *,
    seconds: float,
) -> Results:
    """Log the report and the run's totals; return the results. seconds: time of the run so far."""
    tracker = execution.tracker
    assert tracker is not None
    found = evaluated(execution.spec, outcome)
    report = tracker.log_report(report_of(execution, outcome, found, overrides, seconds))
    results = results_of(
        execution,
        outcome,
        tracker.run_id,
        seconds=seconds,
        policy_digest=release.policy_digest,
        report=report,
        export=str(model_folder(outcome.export)) if outcome.export else None,
        model=release.model,
        champion=release.champion,
        deployment=release.deployment,
        notices=release.notices,
    )
    tracker.log_metrics({"time/total": seconds, "cost/total": results.cost}, outcome.last_step)
    tracker.set_tags({"final_step": str(outcome.step), **({"pruned": "true"} if outcome.pruned else {})})
    return results


def results_of(
    execution: Execution,
    outcome: Outcome,
    run_id: str,
    *,
    seconds: float,
    policy_digest: str | None,
    report: str,
    export: str | None,
    model: str | None,
    champion: dict[str, Any] | None,
    deployment: dict[str, Any] | None = None,
    notices: Sequence[str] = (),
) -> Results:
    """Return the results of a run: what its evaluations measured and its stages took, with what became of its export.
    notices: about that."""
    found = evaluated(execution.spec, outcome)
    return Results(
        run_id=run_id,
        policy_digest=policy_digest,
        summaries=found.summaries,
        titles=found.titles,
        differences=found.differences,
        episodes=_played(execution),
        seconds=seconds,
        stages={label: one.status for label, one in execution.done.items()},
        report=report,
        export=export,
        model=model,
        champion=champion,
        deployment=deployment,
        seed=execution.spec.seed,
        peak_memory_gb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        stage_seconds=_stage_seconds(execution),
        step=outcome.step,
        rounds=outcome.last_step,
        in_rounds={one.step: summary_of(one.evaluation) for one in outcome.measured[1:]},
        notices=[*outcome.decisions, *notices],
        stopped=outcome.stopped is not None,
        pruned=outcome.pruned,
        cost=sum(one.cost for one in execution.done.values()),
        unpriced_calls=sum(one.unpriced for one in execution.done.values()),
    )


def show(results: Results, console: Console, mlflow_ui: str, prefect_ui: str) -> None:
    """Print the end of a run on stderr. mlflow_ui, prefect_ui: commands that show it in a browser."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title="held-out episodes, mean [95 % interval]", box=SIMPLE, title_justify="left")
    table.add_column("policy")
    for name in ("success", "reward", "turns"):
        table.add_column(name, justify="right")
    for row in results.rows():
        table.add_row(*row)
    console.table(table)
    for text in results.differences_text():
        console.line(text)
    ran = sum(status == "ran" for status in results.stages.values())
    cost = f", cost {results.cost:.4g}" if results.cost else ""
    cost += f", and {results.unpriced_calls} calls of judges at a price unknown" if results.unpriced_calls else ""
    console.line(f"{len(results.stages)} stages, {ran} ran, in {duration(results.seconds)}{cost}")
    if results.export:
        console.line(f"model:   {results.export} (registered as {results.model})")
    console.line(f"report:  {results.report}")
    console.line(f"MLflow:  {mlflow_ui}")
    console.line(f"Prefect: {prefect_ui}")


def _played(execution: Execution) -> int:
    """Episodes of all stages, each artifact once; second attempts, other players' and continuations count too."""
    artifacts = {one.artifact.key: one.artifact for one in execution.done.values()}
    return sum(
        int(count)
        for one in artifacts.values()
        if one.kind in ("trajectories", "evaluation")
        for name, count in one.metrics.items()
        if name.rpartition("/")[2] == "episodes"
    )


def _measure(name: str, summary: dict[str, Any] | None, suffix: str = "") -> dict[str, Any]:
    found = summary[name] if summary else {"mean": None, "low": None, "high": None}
    interval = None if found["low"] is None else [found["low"], found["high"]]
    return {f"{name}{suffix}": found["mean"], f"{name}{suffix}_interval": interval}


def _gain(differences: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Success of the final policy less that of the policy evaluated before it, on the same scenarios."""
    if not differences:
        return {"gain": None, "gain_interval": None}
    found = next(iter(differences.values()))
    return {"gain": found["difference"], "gain_interval": [found["low"], found["high"]]}


def _stage_seconds(execution: Execution) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for one in execution.done.values():
        seconds[one.artifact.stage] = round(seconds.get(one.artifact.stage, 0.0) + one.seconds, 2)
    return seconds


def with_interval(found: Mapping[str, Any]) -> str:
    """A measure with its 95 % interval: `0.500 [0.250, 0.750]`; a dash where nothing was measured."""
    return "–" if found["mean"] is None else f"{found['mean']:.3f} {interval(found)}".rstrip()


def interval(found: Mapping[str, Any]) -> str:
    """`[0.250, 0.750]`; empty where there is no interval."""
    return "" if found["low"] is None else f"[{found['low']:.3f}, {found['high']:.3f}]"
