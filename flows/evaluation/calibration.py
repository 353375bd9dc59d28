"""Calibration of a reward for `flows.explain calibrate`: selection of episodes, human scores, and measures.

`CalibrationRunner` runs the stages; `calibration` computes the result from their artifacts.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from components.errors import ResourceError, SpecError
from components.json_text import read_json

if TYPE_CHECKING:
    from components.artifacts import Artifact
    from components.evaluation.calibration import JudgedEpisode, Mark
    from components.pages.calibration import Calibration, Disagreement
    from components.specs import Target
    from components.trajectories.schema import Scenario
    from flows.experiment.spec import ExperimentSpec
    from flows.stages.base import Context, Request
    from flows.terminal.console import Console

_BIAS_THRESHOLD = 0.5
"""Magnitude above which a bias causes a warning even without a mark; its whole interval has to exceed it."""
MOST_MISJUDGED = 6
"""Maximum number of misjudged episodes on the page."""


@dataclass
class CalibrationRunner:
    """Runner of a calibration's stages, in this process and with output to the console."""

    spec: ExperimentSpec
    context: Context
    console: Console

    def stage(self, label: str, request: Request) -> Artifact:
        """Run a stage and return its artifact."""
        from flows.stages import STAGES
        from flows.stages.execute import run_stage
        from flows.terminal.console import duration

        start = time.monotonic()
        with self.console.stage(label, STAGES[request.stage].unit) as view:
            artifact, status = run_stage(request, replace(self.context, progress=view))
        self.console.line(f"{label} {status} in {duration(time.monotonic() - start)}")
        return artifact


def episodes_of_run(spec: ExperimentSpec, context: Context, run: str, labels: Sequence[str]) -> dict[str, Artifact]:
    """Return the episodes of a run's stages, by label; without labels those of its evaluations."""
    from flows.history.records import Records
    from flows.stages import EPISODE_KINDS

    record = Records(spec.root).get(run)
    evaluations = [stage for stage in record.stages if stage.kind == "evaluation"]
    stages = [record.stage(label) for label in labels] or evaluations
    episodes: dict[str, Artifact] = {}
    for stage in stages:
        if stage.kind not in EPISODE_KINDS:
            expected = "expected a stage such as collect[1] or evaluate[final]"
            raise ResourceError(f"--label {stage.label}: has no episodes; {expected}")
        artifact = context.store.find(stage.key)
        if artifact is None:
            raise ResourceError(
                f"{stage.label} of run {record.short} is no longer in {context.store.root}; run it again"
            )
        if artifact.key not in {other.key for other in episodes.values()}:
            episodes[stage.label] = artifact
    if not episodes:
        raise ResourceError(f"run {record.short} has no evaluation yet; select a collect stage with --label")
    return episodes


def play(work: CalibrationRunner) -> dict[str, Artifact]:
    """Collect episodes of the held-out split, by the untrained model and by the environment's solver if it has one."""
    from components.models.weights import check_weights
    from flows.experiment.requests import Requests
    from flows.stages.episodes import scenarios_of

    spec, requests = work.spec, Requests(work.spec)
    spec.inference.check_prerequisites()
    check_weights(spec.model, work.context.cache)
    environment = spec.required_environment
    available = scenarios_of(environment, spec.evaluate.split, work.context)
    count = min(spec.calibrate.scenarios, len(available))
    use_solver = spec.calibrate.solutions
    if use_solver is None:
        use_solver = has_solutions(environment, available)
    episodes = {"policy": work.stage("collect[policy]", requests.collect_heldout("policy", count))}
    if use_solver:
        episodes["solver"] = work.stage("collect[solver]", requests.collect_heldout("solver", count))
    return episodes


def has_solutions(environment: Target, scenarios: Sequence[Scenario]) -> bool:
    """Return True if the environment has reference solutions of these scenarios."""
    if "solve" not in dir(environment.factory()):
        return False
    instance = environment.build()
    try:
        if hasattr(instance, "check_solutions"):
            instance.check_solutions(scenarios)
    except SpecError:
        return False
    finally:
        result = instance.close()
        if inspect.isawaitable(result):
            asyncio.run(_await(result))
    return True


async def _await(awaitable: Any) -> Any:
    return await awaitable


def read_people(path: Path) -> dict[str, float]:
    """Return the human scores in a file by episode id, averaged per episode.

    Raises ResourceError if the file cannot be read or a line has no id or no finite number.
    """
    by_id: defaultdict[str, list[float]] = defaultdict(list)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(f"--people: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            name, score = data["trajectory_id"], data["score"]
            if not isinstance(name, str) or isinstance(score, bool) or not math.isfinite(score):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            expected = '{"trajectory_id": "...", "score": 4}'
            raise ResourceError(f"--people: {path}, line {number}: {line[:80]!r}; expected {expected}") from None
        by_id[name].append(float(score))
    if not by_id:
        raise ResourceError(f"--people: {path} has no line; expected at least one score")
    return {name: fmean(scores) for name, scores in by_id.items()}


def check_people(scores: Mapping[str, float], episodes: Mapping[str, Artifact], path: Path | None) -> None:
    """Raise ResourceError if there is no human score for any of these episodes. path: the scores' file."""
    from components.trajectories.store import read_trajectories

    prefixed = len(episodes) > 1
    ids = {
        f"{label}:{trajectory.id}" if prefixed else trajectory.id
        for label, artifact in episodes.items()
        for trajectory in read_trajectories(artifact.path / "trajectories.parquet")
    }
    if not ids & scores.keys():
        raise ResourceError(
            f"--people: none of the {len(scores)} ids in {path} is an id of these episodes; expected ids such as "
            f"{min(ids, default='')!r}, found {min(scores)!r}. Select the stage with --label"
        )


def calibration(
    spec: ExperimentSpec, judged: Artifact, episodes: Mapping[str, Artifact], truth: str, overrides: Sequence[str]
) -> Calibration:
    """Return the calibration of the reward from the artifact of the `calibrate` stage and its episodes."""
    from components.evaluation import calibration as measures
    from components.pages.calibration import Calibration
    from flows.stages.calibrate import TABLE

    rows = [measures.JudgedEpisode(**row) for row in read_json(judged.path / TABLE)]
    measured = measures.measure(rows, spec.calibrate.threshold)
    metrics = judged.metrics
    judgements = metrics["judgements"]
    counts = {
        "failed": metrics["failed"],
        "without_truth": metrics["without_truth"],
        "unscored": metrics["unscored"] / judgements if judgements else None,
        "cost_per_thousand": 1000 * metrics["cost"] / judgements if "cost" in metrics and judgements else None,
        "seconds_per_thousand": 1000 * metrics["judging_seconds"] / judgements if judgements else None,
    }
    values = {name: measure["value"] for name, measure in measured.items() if isinstance(measure, dict)} | counts
    marks = measures.judge_by(spec.calibrate.marks.required(), values)
    return Calibration(
        experiment=spec.name,
        reward=spec.reward.target.rpartition(".")[2],
        truth=truth,
        measures=measured,
        counts=counts,
        curve=measures.curve(rows),
        roc=measures.roc(rows, measured["threshold"]),
        marks=marks,
        warnings=_warnings(measured, marks, rows),
        misjudged=_misjudged(rows, judged, episodes),
        created=time.strftime("%Y-%m-%d %H:%M:%S"),
        config=spec.reward.model_dump(mode="json"),
        overrides=overrides,
    )


def _warnings(measured: Mapping[str, Any], marks: Sequence[Mark], rows: Sequence[JudgedEpisode]) -> list[str]:
    """Return the warnings about a judge: missed marks, and problems detected without a mark."""
    truths = {row.truth for row in rows}
    scores = {score for row in rows for score in row.scores if score is not None}
    warnings = [f"the judge is worse than its mark: {mark}" for mark in marks if not mark.met]
    auc = measured["auc"]
    if not measured["episodes"]:
        warnings.append("no episode has both a score and a ground truth, so the judge cannot be measured")
    elif len(truths) == 1:
        warnings.append(
            f"the truth is {min(truths):g} for all {measured['episodes']} episodes, so the judge cannot be measured. "
            "Use episodes of both outcomes: another run or stage (--run, --label), or more scenarios "
            "(calibrate.scenarios)"
        )
    elif auc["value"] is not None and (auc["value"] <= 0.5 or (auc["low"] or 0.0) <= 0.5):
        interval = "" if auc["low"] is None else f" [{auc['low']:.3f}, {auc['high']:.3f}]"
        warnings.append(f"the judge is not better than chance: auc {auc['value']:.3f}{interval}")
    if len(scores) == 1 and measured["episodes"] > 1:
        warnings.append(
            f"every score is {min(scores):g}, so the judge distinguishes no episodes. A judge that compares the "
            "episodes of a group is not called if all of them are identical"
        )
    biases = {"length_bias": "the length of an episode", "position_bias": "the position at which it is shown"}
    for name, cause in biases.items():
        bias = measured[name]
        if bias["low"] is not None and (bias["low"] > _BIAS_THRESHOLD or bias["high"] < -_BIAS_THRESHOLD):
            interval = f"[{bias['low']:+.3f}, {bias['high']:+.3f}]"
            warnings.append(f"the scores correlate with {cause}: {name} {bias['value']:+.3f} {interval}")
    return warnings


def _misjudged(rows: Sequence[JudgedEpisode], judged: Artifact, episodes: Mapping[str, Artifact]) -> list[Disagreement]:
    """Return the episodes with the largest difference between rank by score and rank by truth, one per group."""
    import numpy as np

    from components.evaluation.calibration import ranks
    from components.pages.calibration import Disagreement
    from components.trajectories.store import read_scores, read_trajectories

    scored = [(row, row.scores[0]) for row in rows if row.scores[0] is not None]
    if not scored:
        return []
    weights = np.ones((1, len(scored)))
    by_score, by_truth = (
        ranks(np.array(values, float), weights)[0]
        for values in ([score for _, score in scored], [row.truth for row, _ in scored])
    )
    order = sorted(range(len(scored)), key=lambda index: -abs(by_score[index] - by_truth[index]))
    by_group: dict[str, tuple[JudgedEpisode, float]] = {}
    for index in order:
        row, score = scored[index]
        if len(by_group) < MOST_MISJUDGED and abs(by_score[index] - by_truth[index]) > len(scored) / 4:
            by_group.setdefault(row.group, (row, score))
    selected = {row.id: (row, score) for row, score in by_group.values()}
    explanations = {score.trajectory_id: score.explanation for score in read_scores(judged.path / "scores-1.parquet")}
    misjudged = {}
    for label, artifact in episodes.items():
        for trajectory in read_trajectories(artifact.path / "trajectories.parquet"):
            name = f"{label}:{trajectory.id}" if len(episodes) > 1 else trajectory.id
            if name in selected:
                row, score = selected[name]
                trajectory.reward = score
                misjudged[name] = Disagreement(trajectory, score, row.truth, explanations.get(name, ""))
    return [misjudged[name] for name in selected]


def target_name(target: Any) -> str | None:
    """Return the name of the target's class or function, without its module; None for no target."""
    return None if target is None else str(target.target.rpartition(".")[2])
