"""The report of a run, from what its stages left; also of one that a guard ended."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from components.artifacts import Artifact
from components.deployment.spec import Format
from components.json_text import read_json
from components.trajectories.schema import Score, Trajectory
from flows.execution.executor import Execution
from flows.experiment.guards import RULES
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Notice
from flows.recipes.outcome import Outcome
from flows.stages import selections
from flows.stages.episode_failures import failures_of

if TYPE_CHECKING:
    from components.evaluation.report import Finding, RewardTraining, SelectionRow


def titles_by(algorithm: str, warmup: bool) -> dict[str, str]:
    """What the evaluated policies are called, by the algorithm of the rounds; a warmup is SFT too."""
    final = "after the rounds" if warmup and algorithm == "sft" else f"after {algorithm.upper()}"
    return {"start": "start", "sft": "after SFT", "feedback": "after feedback", "final": final}


def titles_of(spec: ExperimentSpec, outcome: Outcome) -> dict[str, str]:
    """What the evaluated policies are called; the final one by its round where that is not the last of the experiment,
    or was chosen."""
    named = titles_by(spec.algorithm.name, "sft" in outcome.evaluations)
    titles = {name: named[name] for name in outcome.evaluations}
    if "final" in titles:
        if outcome.step == outcome.first_step:
            titles["final"] = "start of the rounds"
        elif outcome.step != spec.rounds or spec.deploy.policy == "best":
            titles["final"] += f", round {outcome.step}"
        if spec.deploy.policy == "best":
            titles["final"] += " (best)"
    return titles


@dataclass(frozen=True)
class Evaluated:
    """What the evaluations of a run say, by `start`, `sft`, `feedback`, `final`, as far as there are."""

    titles: dict[str, str]
    summaries: dict[str, dict[str, Any]]
    """What `components.evaluation.metrics.summarise` returns."""
    episodes: dict[str, list[Trajectory]]
    differences: dict[str, dict[str, Any]]
    """The last against each earlier one, by title: what `components.evaluation.metrics.paired_difference` returns."""


def evaluated(spec: ExperimentSpec, outcome: Outcome) -> Evaluated:
    """Reads the evaluations."""
    from components.evaluation.metrics import paired_difference

    titles = titles_of(spec, outcome)
    summaries = {name: summary_of(artifact) for name, artifact in outcome.evaluations.items()}
    episodes = {name: _episodes(artifact) for name, artifact in outcome.evaluations.items()}
    *before, last = titles
    differences = {
        f"{titles[last]} against {titles[name]}": paired_difference(episodes[name], episodes[last])
        for name in reversed(before)
    }
    return Evaluated(titles, summaries, episodes, differences)


def struck(execution: Execution, outcome: Outcome, overrides: Sequence[str], seconds: float, words: str) -> None:
    """Leaves the report of a run that a guard ended: what was measured until then, and what the guard found."""
    tracker = execution.tracker
    assert tracker is not None
    tracker.outbox.drain(execution.spec.tracking.patience)
    page = report_of(execution, outcome, evaluated(execution.spec, outcome), overrides, seconds, words)
    execution.console.line(f"report:  {tracker.log_report(page)}")


def report_of(
    execution: Execution,
    outcome: Outcome,
    found: Evaluated,
    overrides: Sequence[str],
    seconds: float,
    ended_by: str | None = None,
) -> str:
    """The page. ended_by: the guard's words, where one ended the run."""
    from components.evaluation.report import Evaluation, FailureRow, Report, StageRow, render
    from components.tracking.provenance import git_commit, package_versions
    from flows.experiment.spec import CODE
    from flows.reporting.lineage import origins

    assert execution.tracker is not None
    scores = {name: _scores(artifact) for name, artifact in outcome.evaluations.items()}
    stages = [
        StageRow(
            one.label,
            one.artifact.stage,
            one.status,
            one.seconds,
            one.artifact.key,
            one.artifact.digest,
            one.cost,
            one.unpriced,
        )
        for one in execution.done.values()
    ]
    return render(
        Report(
            experiment=execution.spec.name,
            run_id=execution.tracker.run_id,
            created=time.strftime("%Y-%m-%d %H:%M:%S"),
            seed=execution.spec.seed,
            seconds=seconds,
            evaluations=[
                Evaluation(title, found.summaries[name], found.episodes[name], scores[name])
                for name, title in found.titles.items()
            ],
            differences=found.differences,
            rounds=_rounds(execution.spec, outcome),
            notes=outcome.decisions if ended_by is None else [*outcome.decisions, f"a guard ended the run: {ended_by}"],
            failures=[
                FailureRow(label, kinds)
                for label, one in execution.done.items()
                if (kinds := failures_of(one.artifact))
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
            command=shlex.join(["python", "-m", "flows.run", *overrides]),
        )
    )


def _rounds(spec: ExperimentSpec, outcome: Outcome) -> list[dict[str, float]]:
    """The figures of each round; held-out ones where the policy was evaluated in the rounds."""
    held_out = {one.step: one.evaluation.metrics for one in outcome.measured} if spec.evaluate.every else {}
    return [
        round_figures(artifacts)
        | {f"heldout_{name}": held_out[n][name] for name in ("success", "reward") if name in held_out.get(n, {})}
        for n, artifacts in enumerate(outcome.rounds, outcome.first_step + 1)
    ]


def _selections(execution: Execution) -> list[SelectionRow]:
    """What each filter has kept, and why not the rest."""
    from components.evaluation.report import SelectionRow

    found = [(label, one.artifact.metrics) for label, one in execution.done.items() if one.artifact.stage == "filter"]
    return [
        SelectionRow(
            label,
            episodes=round(metrics["kept"] + metrics["dropped"]),
            kept=round(metrics["kept"]),
            scenarios=round(metrics["scenarios"]),
            dropped=selections.reasons(metrics),
        )
        for label, metrics in found
        if metrics
    ]


def _findings(notices: Sequence[Notice]) -> list[Finding]:
    """What the guards found."""
    from components.evaluation.report import Finding

    return [
        Finding(one.kind, one.step, one.message, [asdict(episode) for episode in one.episodes])
        for one in notices
        if one.kind in RULES
    ]


def _reward_models(outcome: Outcome) -> list[RewardTraining]:
    """What became of each training of a reward model."""
    from components.evaluation.report import RewardTraining

    return [
        RewardTraining(
            model=number,
            step=step,
            examples=one.metrics.get("pairs", one.metrics.get("labelled_episodes")),
            heldout_pairs=one.metrics.get("heldout_pairs"),
            accuracy=one.metrics.get("heldout_accuracy"),
            before=one.metrics.get("heldout_accuracy_before"),
            earlier=one.metrics.get("heldout_accuracy_earlier"),
        )
        for step, models in outcome.reward_models.items()
        for number, one in enumerate(models, 1)
    ]


def round_figures(artifacts: dict[str, Artifact]) -> dict[str, float]:
    """A round's metrics under the names that the report plots; of half a round, those that there are."""
    collect, judge, train = (
        artifacts[stage].metrics if stage in artifacts else {} for stage in ("collect", "judge", "train")
    )
    row = dict(train)
    for name, metrics, key in (
        ("reward", judge, "reward"),
        ("success", collect, "success"),
        ("turns", collect, "turns"),
        ("sampled_tokens", collect, "tokens_per_episode"),
        ("sampling_tokens_per_s", collect, "tokens_per_s"),
        ("repetition", collect, "repetition"),
        ("identical_within", collect, "identical_within"),
        ("identical_between", collect, "identical_between"),
        ("spread", judge, "components/spread"),
    ):
        row.pop(name, None)
        if key in metrics:
            row[name] = metrics[key]
    for metrics, key in ((collect, "success"), (judge, "reward"), (collect, "episodes")):
        row |= {name: value for name, value in metrics.items() if name.endswith(f"/{key}")}  # of whom else it played
    row |= {name: value for name, value in judge.items() if name.startswith("components/")}
    return row | {f"{stage}_s": artifact.seconds for stage, artifact in artifacts.items()}


def model_folder(export: Artifact) -> Path:
    """The folder that is named as the model: the merged one where there is one."""
    return next((export.path / name for name in get_args(Format) if (export.path / name).is_dir()), export.path)


def summary_of(evaluation: Artifact) -> dict[str, Any]:
    """What an evaluation says in figures."""
    found: dict[str, Any] = read_json(evaluation.path / "summary.json")
    return found


def _episodes(artifact: Artifact) -> list[Trajectory]:
    from components.trajectories.store import load_scored

    return load_scored(artifact.path / "trajectories.parquet", artifact.path / "scores.parquet", None)


def _scores(artifact: Artifact) -> dict[str, Score]:
    from components.trajectories.store import read_scores

    return {score.trajectory_id: score for score in read_scores(artifact.path / "scores.parquet")}
