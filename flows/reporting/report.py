"""Report of a run from the artifacts of its stages, also for a run that a guard stopped."""

from __future__ import annotations

import fnmatch
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from components.artifacts import Artifact
from components.deployment.spec import Format
from components.json_text import read_json
from flows.execution.executor import Execution
from flows.experiment.guards import RULES
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Notice
from flows.recipes.outcome import RunOutcome
from flows.stages import ROUND_STAGES, STAGES, selections
from flows.stages.anchors import anchor_label, drift_metrics
from flows.stages.episode_failures import failures_of, limits_of

if TYPE_CHECKING:
    from components.pages.report import Finding, HeldoutAnswer, RewardTraining, SelectionRow
    from components.trajectories.stored import StoredTrajectories


def titles_by(algorithm: str, warmup: bool) -> dict[str, str]:
    """Return the titles of the evaluated policies by name. algorithm: that of the rounds. warmup: the run has one,
    which is SFT, too."""
    final = "after the rounds" if warmup and algorithm == "sft" else f"after {algorithm.upper()}"
    return {"start": "start", "sft": "after SFT", "feedback": "after feedback", "final": final}


def titles_of(spec: ExperimentSpec, outcome: RunOutcome) -> dict[str, str]:
    """Return the titles of the evaluated policies by name. The final policy's title names its round if that is not the
    experiment's last one, or if it was selected as the best."""
    all_titles = titles_by(spec.algorithm.name, "sft" in outcome.evaluations)
    titles = {name: all_titles.get(name, f"after {name}") for name in outcome.evaluations}
    if "final" in titles and not outcome.measured:
        titles["final"] = f"after {spec.flow.name.replace('_', ' ')} {spec.algorithm.name.upper()}"
    elif "final" in titles:
        if outcome.step == outcome.first_step:
            titles["final"] = "start of the rounds"
        elif outcome.step != spec.rounds or spec.deploy.policy == "best":
            titles["final"] += f", round {outcome.step}"
        if spec.deploy.policy == "best":
            titles["final"] += " (best)"
    return titles


@dataclass(frozen=True)
class EvaluationResults:
    """Evaluations of a run, by `start`, `sft`, `feedback`, `final`, as far as they exist."""

    titles: dict[str, str]
    summaries: dict[str, dict[str, Any]]
    """Results of `components.evaluation.metrics.summarise`."""
    episodes: dict[str, StoredTrajectories]
    differences: dict[str, dict[str, Any]]
    """Results of `components.evaluation.metrics.paired_difference` of the last evaluation against each earlier one, by
    title. A pair without a scenario that both finished is left out."""


def load_evaluations(spec: ExperimentSpec, outcome: RunOutcome) -> EvaluationResults:
    """Load the evaluations of a run."""
    from components.evaluation.metrics import paired_success
    from components.evaluation.sequential import alpha_of
    from components.trajectories.stored import StoredTrajectories

    titles = titles_of(spec, outcome)
    if not titles:  # no environment is played
        return EvaluationResults({}, {}, {}, {})
    summaries = {name: summary_of(artifact) for name, artifact in outcome.evaluations.items()}
    episodes = {name: StoredTrajectories(artifact.path) for name, artifact in outcome.evaluations.items()}
    *earlier, last = titles
    differences = paired_success(
        {
            f"{titles[last]} against {titles[name]}": (
                episodes[name],
                episodes[last],
                alpha_of(summaries[name], summaries[last]),
            )
            for name in reversed(earlier)
            if summaries[name]["success"]["n"] and summaries[last]["success"]["n"]
        }
    )
    return EvaluationResults(titles, summaries, episodes, differences)


def heldout_metrics(outcome: RunOutcome) -> dict[str, dict[str, float]]:
    """Return the metrics of held-out rows of imported data, `before` and `after` the training on it."""
    return {name: dict(artifact.metrics) for name, artifact in outcome.validations.items()}


def heldout_answers(outcome: RunOutcome) -> list[HeldoutAnswer]:
    """Return the answers to prompts of held-out rows; none if the training did not finish."""
    from components.pages.report import HeldoutAnswer
    from flows.stages.sample import read_answers

    if set(outcome.answers) != {"before", "after"}:
        return []
    before, after = (read_answers(outcome.answers[name].path) for name in ("before", "after"))
    return [
        HeldoutAnswer(
            _text(earlier["messages"][-1]) if earlier["messages"] else "",
            _text(earlier["reference"]),
            _text(earlier["answer"]),
            _text(later["answer"]),
        )
        for earlier, later in zip(before, after, strict=True)
    ]


def _text(message: Mapping[str, Any]) -> str:
    """Return the content and the calls of a message as text."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return "\n".join(
        filter(None, [message.get("content"), *(f"{call['name']}({call['arguments']})" for call in calls)])
    )


def stopped_evaluations(titles: Mapping[str, str], summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a text on the end of each evaluation that may stop early (`evaluate.stop=decided`). titles: of the
    evaluated policies by name."""
    from components.evaluation.sequential import describe

    sequences = {titles[name]: summary["sequence"] for name, summary in summaries.items() if "sequence" in summary}
    return [f"evaluation {title}: {describe(sequence)}" for title, sequence in sequences.items()]


def log_stopped_report(
    execution: Execution, outcome: RunOutcome, overrides: Sequence[str], seconds: float, words: str
) -> None:
    """Log the report of a run that a guard stopped: the results so far and the guard's finding. words: the finding."""
    tracker = execution.tracker
    assert tracker is not None
    tracker.outbox.drain(execution.spec.tracking.patience)
    evaluations = load_evaluations(execution.spec, outcome)
    page = report_of(execution, outcome, evaluations, overrides, seconds, words)
    execution.console.line(f"report:  {tracker.log_report(page)}")


def report_of(
    execution: Execution,
    outcome: RunOutcome,
    evaluations: EvaluationResults,
    overrides: Sequence[str],
    seconds: float,
    ended_by: str | None = None,
    command: Sequence[str] | None = None,
) -> str:
    """Return the report's HTML. ended_by: message of the guard that stopped the run, if any. command: that of the run;
    None: `flows.run` with the overrides."""
    from components.pages.report import Evaluation, FailureRow, Report, StageRow, render
    from components.tracking.provenance import git_commit, package_versions
    from flows.reporting.lineage import origins
    from flows.terminal.arguments import CODE

    assert execution.tracker is not None
    stages = [
        StageRow(
            done.label,
            done.status,
            done.seconds,
            done.artifact.key,
            done.artifact.digest,
            done.cost,
            done.unpriced,
        )
        for done in execution.done.values()
    ]
    return render(
        Report(
            experiment=execution.spec.name,
            run_id=execution.tracker.run_id,
            created=time.strftime("%Y-%m-%d %H:%M:%S"),
            seed=execution.spec.seed,
            seconds=seconds,
            evaluations=[
                Evaluation(
                    title, evaluations.summaries[name], evaluations.episodes[name], evaluations.episodes[name].scores
                )
                for name, title in evaluations.titles.items()
            ],
            heldout=heldout_metrics(outcome),
            answers=heldout_answers(outcome),
            differences=evaluations.differences,
            rounds=_rounds(execution, outcome),
            round_stages=ROUND_STAGES,
            notes=[
                *outcome.decisions,
                *stopped_evaluations(evaluations.titles, evaluations.summaries),
                *([] if ended_by is None else [f"a guard ended the run: {ended_by}"]),
            ],
            failures=[
                FailureRow(label, kinds)
                for label, done in execution.done.items()
                if (kinds := failures_of(done.artifact))
            ],
            limits=[
                (label, text) for label, done in execution.done.items() for _, text in limits_of(done.artifact).values()
            ],
            selections=_selections(execution),
            findings=_findings(execution.notices),
            reward_models=_reward_models(outcome),
            stages=stages,
            lineage=origins(execution.lineage, outcome.checkpoint.key)
            if execution.lineage and outcome.checkpoint
            else (),
            config=execution.spec.model_dump(mode="json", by_alias=True),
            overrides=list(overrides),
            export=str(model_folder(outcome.export)) if outcome.export else "",
            versions=package_versions(),
            git_commit=git_commit(CODE) or "",
            command=shlex.join(command or ["python", "-m", "flows.run", *overrides]),
        )
    )


def _rounds(execution: Execution, outcome: RunOutcome) -> list[dict[str, float]]:
    """Return the metrics of each round, with held-out metrics if the policy was evaluated in the rounds, and with the
    drift of the judge if it is measured."""
    every = execution.spec.evaluate.every
    held_out = {measured.step: measured.evaluation.metrics for measured in outcome.measured} if every else {}
    return [
        round_figures(artifacts)
        | drift_figures(execution, n)
        | {f"heldout_{name}": held_out[n][name] for name in ("success", "reward") if name in held_out.get(n, {})}
        for n, artifacts in enumerate(outcome.rounds, outcome.first_step + 1)
    ]


def _selections(execution: Execution) -> list[SelectionRow]:
    """Return the counts of kept and dropped episodes of each filter, with the reasons for dropping."""
    from components.pages.report import SelectionRow

    metrics_by_label = [
        (label, done.artifact.metrics) for label, done in execution.done.items() if done.artifact.stage == "filter"
    ]
    return [
        SelectionRow(
            label,
            episodes=round(metrics["kept"] + metrics["dropped"]),
            kept=round(metrics["kept"]),
            scenarios=round(metrics["scenarios"]),
            dropped=selections.reasons(metrics),
        )
        for label, metrics in metrics_by_label
        if metrics
    ]


def _findings(notices: Sequence[Notice]) -> list[Finding]:
    """Return the findings of the guards."""
    from components.pages.report import Finding

    return [
        Finding(notice.kind, notice.step, notice.message, [asdict(episode) for episode in notice.episodes])
        for notice in notices
        if notice.kind in RULES
    ]


def _reward_models(outcome: RunOutcome) -> list[RewardTraining]:
    """Return the results of each training of a reward model."""
    from components.pages.report import RewardTraining

    return [
        RewardTraining(
            model=number,
            step=step,
            examples=model.metrics.get("pairs", model.metrics.get("labelled_episodes")),
            heldout_pairs=model.metrics.get("heldout_pairs"),
            accuracy=model.metrics.get("heldout_accuracy"),
            before=model.metrics.get("heldout_accuracy_before"),
            earlier=model.metrics.get("heldout_accuracy_earlier"),
            epochs=_epochs(model.metrics),
            calibration=_bins(model.metrics),
            calibration_error=model.metrics.get("calibration_error"),
        )
        for step, models in outcome.reward_models.items()
        for number, model in enumerate(models, 1)
    ]


def _epochs(metrics: Mapping[str, float]) -> list[tuple[float | None, float | None]]:
    """Return training and held-out accuracy of each epoch."""
    numbers = sorted({int(name.split("/")[1]) for name in metrics if name.startswith("epoch/")})
    names = ("accuracy", "heldout_accuracy")
    return [tuple(metrics.get(f"epoch/{number}/{name}") for name in names) for number in numbers]  # type: ignore[misc]


def _bins(metrics: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the bins of the calibration, in ascending order."""
    starts = sorted({name.split("/")[1] for name in metrics if name.startswith("calibration/")})
    names = ("predicted", "observed", "pairs")
    return [{name: metrics[f"calibration/{start}/{name}"] for name in names} for start in starts]


def round_figures(artifacts: dict[str, Artifact]) -> dict[str, float]:
    """Return a round's metrics with the names that the report plots; for an unfinished round the available ones."""
    renamed = {name for stage in STAGES.values() for name in stage.round_metrics.values()}
    row: dict[str, float] = {}
    for stage, artifact in reversed(artifacts.items()):  # training first
        for pattern, name in STAGES[stage].round_metrics.items():
            for metric in fnmatch.filter(artifact.metrics, pattern):
                if name != "*" or metric not in renamed:
                    row[metric if name == "*" else name] = artifact.metrics[metric]
    return row | {f"{stage}_s": artifact.seconds for stage, artifact in artifacts.items()}


def drift_figures(execution: Execution, number: int) -> dict[str, float]:
    """Return the drift of the judge in a round with the names that the report plots; empty if it is not measured."""
    done = execution.done.get(anchor_label(number))
    drift = drift_metrics(done.artifact.metrics) if done is not None else {}
    return {f"judge_{name}": drift[name] for name in ("shift", "flips", "unscored") if name in drift}


def model_folder(export: Artifact) -> Path:
    """Return the folder of an export's model: the first existing format, so the merged model if there is one."""
    return next((export.path / name for name in get_args(Format) if (export.path / name).is_dir()), export.path)


def summary_of(evaluation: Artifact) -> dict[str, Any]:
    """Return the summary of an evaluation. Success is measured only if an episode states it."""
    from components.evaluation.metrics import states_success, without_success
    from components.trajectories.stored import StoredTrajectories

    summary: dict[str, Any] = read_json(evaluation.path / "summary.json")
    unknown = summary["success"]["mean"] == 0 and not states_success(StoredTrajectories(evaluation.path))
    return without_success(summary) if unknown else summary
