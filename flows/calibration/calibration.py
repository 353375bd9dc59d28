"""What `flows.calibrate` measures: which episodes are judged, what people say of them, and what is found.

`Work` runs the stages; `calibration` reads what they left.
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
    from components.evaluation.calibration import Judged
    from components.evaluation.calibration_page import Calibration, Misjudged
    from components.evaluation.thresholds import Mark
    from components.specs import Target
    from components.trajectories.schema import Scenario
    from flows.experiment.spec import ExperimentSpec
    from flows.stages.base import Context, Request
    from flows.terminal.console import Console

MUCH = 0.5
"""A bias that is warned of without a mark: its whole interval is beyond this."""
MOST_MISJUDGED = 6
"""Episodes on the page."""


@dataclass
class Work:
    """Runs the stages of a calibration, here, and tells the console."""

    spec: ExperimentSpec
    context: Context
    console: Console

    def stage(self, label: str, request: Request) -> Artifact:
        from flows.execution.executor import UNITS
        from flows.stages.execute import run_stage
        from flows.terminal.console import duration

        start = time.monotonic()
        with self.console.stage(label, UNITS.get(request.stage, "scores")) as view:
            artifact, status = run_stage(request, replace(self.context, progress=view))
        self.console.line(f"{label} {status} in {duration(time.monotonic() - start)}")
        return artifact


def episodes_of_run(spec: ExperimentSpec, context: Context, run: str, labels: Sequence[str]) -> dict[str, Artifact]:
    """The episodes of stages of a run, by label; of its evaluations, where no label is given."""
    from flows.history.records import Records

    record = Records(spec.root).get(run)
    chosen = [record.stage(label) for label in labels] or [one for one in record.stages if one.kind == "evaluation"]
    found: dict[str, Artifact] = {}
    for one in chosen:
        if one.kind not in ("evaluation", "trajectories"):
            expected = "expected one such as collect[1] or evaluate[final]"
            raise ResourceError(f"--label {one.label}: has no episodes; {expected}")
        artifact = context.store.find(one.key)
        if artifact is None:
            raise ResourceError(f"{one.label} of run {record.short} is no longer in {context.store.root}; run it again")
        if artifact.key not in {other.key for other in found.values()}:
            found[one.label] = artifact
    if not found:
        raise ResourceError(f"run {record.short} has no evaluation yet; choose a collection with --label")
    return found


def play(work: Work) -> dict[str, Artifact]:
    """Episodes of the held-out split, by the model as it is and by the environment's own solver."""
    from components.inference.spec import RemoteSpec, VllmSpec
    from components.models.weights import check_weights
    from flows.experiment.requests import Requests
    from flows.stages.episodes import scenarios_of

    spec, requests = work.spec, Requests(work.spec)
    if isinstance(spec.inference, RemoteSpec | VllmSpec):
        spec.inference.key()
    check_weights(spec.model, work.context.cache)
    available = scenarios_of(spec.environment, spec.evaluate.split, work.context)
    count = min(spec.calibrate.scenarios, len(available))
    solved = spec.calibrate.solutions
    if solved is None:
        solved = has_solutions(spec.environment, available)
    found = {"policy": work.stage("collect[policy]", requests.collect_heldout("policy", count))}
    if solved:
        found["solver"] = work.stage("collect[solver]", requests.collect_heldout("solver", count))
    return found


def has_solutions(environment: Target, scenarios: Sequence[Scenario]) -> bool:
    """Whether the environment can show how these scenarios are solved."""
    if "solve" not in dir(environment.factory()):
        return False
    built = environment.build()
    try:
        if hasattr(built, "check_solutions"):
            built.check_solutions(scenarios)
    except SpecError:
        return False
    finally:
        closed = built.close()
        if inspect.isawaitable(closed):
            asyncio.run(_awaited(closed))
    return True


async def _awaited(found: Any) -> Any:
    return await found


def read_people(path: Path) -> dict[str, float]:
    """What people say of episodes, by id: the mean where several lines are of one. Raises ResourceError for a file that
    cannot be read, or a line without an id or a number."""
    said: defaultdict[str, list[float]] = defaultdict(list)
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
        said[name].append(float(score))
    if not said:
        raise ResourceError(f"--people: {path} has no line; expected at least one score")
    return {name: fmean(scores) for name, scores in said.items()}


def check_people(said: Mapping[str, float], episodes: Mapping[str, Artifact], path: Path | None) -> None:
    """Raises ResourceError where people say nothing of these episodes."""
    from components.trajectories.store import read_trajectories

    prefixed = len(episodes) > 1
    ids = {
        f"{label}:{one.id}" if prefixed else one.id
        for label, artifact in episodes.items()
        for one in read_trajectories(artifact.path / "trajectories.parquet")
    }
    if not ids & said.keys():
        raise ResourceError(
            f"--people: none of the {len(said)} ids in {path} is one of these episodes; theirs are such as "
            f"{min(ids, default='')!r}, found {min(said)!r}. Choose the stage with --label"
        )


def calibration(
    spec: ExperimentSpec, judged: Artifact, episodes: Mapping[str, Artifact], truth: str, overrides: Sequence[str]
) -> Calibration:
    from components.evaluation import calibration as measures
    from components.evaluation.calibration_page import Calibration
    from components.evaluation.thresholds import judge_by
    from flows.stages.calibrate import TABLE

    rows = [measures.Judged(**row) for row in read_json(judged.path / TABLE)]
    found = measures.measure(rows, spec.calibrate.threshold)
    counted = judged.metrics
    judgements = counted["judgements"]
    counts = {
        "failed": counted["failed"],
        "without_truth": counted["without_truth"],
        "unscored": counted["unscored"] / judgements if judgements else None,
        "cost_per_thousand": 1000 * counted["cost"] / judgements if "cost" in counted and judgements else None,
        "seconds_per_thousand": 1000 * counted["judging_seconds"] / judgements if judgements else None,
    }
    values = {name: one["value"] for name, one in found.items() if isinstance(one, dict)} | counts
    marks = judge_by(spec.calibrate.marks.asked(), values)
    return Calibration(
        experiment=spec.name,
        reward=spec.reward.target.rpartition(".")[2],
        truth=truth,
        measures=found,
        counts=counts,
        curve=measures.curve(rows),
        roc=measures.roc(rows, found["threshold"]),
        marks=marks,
        warnings=_warnings(found, marks, rows),
        misjudged=_misjudged(rows, judged, episodes),
        created=time.strftime("%Y-%m-%d %H:%M:%S"),
        config=spec.reward.model_dump(mode="json"),
        overrides=overrides,
    )


def _warnings(found: Mapping[str, Any], marks: Sequence[Mark], rows: Sequence[Judged]) -> list[str]:
    """What has to be said of a judge, asked or not."""
    truths, scores = {row.truth for row in rows}, {one for row in rows for one in row.scores if one is not None}
    said = [f"the judge is worse than its mark: {mark}" for mark in marks if not mark.met]
    auc = found["auc"]
    if not found["episodes"]:
        said.append("no episode has both a score and a truth: nothing can be told")
    elif len(truths) == 1:
        said.append(
            f"the truth is {min(truths):g} for all {found['episodes']} episodes: nothing can be told of the judge. "
            "Take episodes of which some are good: of another run or stage (--run, --label), or more of them "
            "(calibrate.scenarios)"
        )
    elif auc["value"] is not None and (auc["value"] <= 0.5 or (auc["low"] or 0.0) <= 0.5):
        at = "" if auc["low"] is None else f" [{auc['low']:.3f}, {auc['high']:.3f}]"
        said.append(f"the judge cannot be told from chance: auc {auc['value']:.3f}{at}")
    if len(scores) == 1 and found["episodes"] > 1:
        said.append(
            f"every score is {min(scores):g}: the judge tells nothing apart. One that compares the episodes of a group "
            "is not asked where they all say the same"
        )
    biases = {"length_bias": "the length of an episode", "position_bias": "the place at which it is shown"}
    for name, words in biases.items():
        one = found[name]
        if one["low"] is not None and (one["low"] > MUCH or one["high"] < -MUCH):
            at = f"[{one['low']:+.3f}, {one['high']:+.3f}]"
            said.append(f"the scores follow {words}: {name} {one['value']:+.3f} {at}")
    return said


def _misjudged(rows: Sequence[Judged], judged: Artifact, episodes: Mapping[str, Artifact]) -> list[Misjudged]:
    """The episodes whose rank by score is furthest from that by truth, of different scenarios first."""
    import numpy as np

    from components.evaluation.calibration import ranks
    from components.evaluation.calibration_page import Misjudged
    from components.trajectories.store import read_scores, read_trajectories

    scored = [(row, row.scores[0]) for row in rows if row.scores[0] is not None]
    if not scored:
        return []
    once = np.ones((1, len(scored)))
    by_score, by_truth = (
        ranks(np.array(values, float), once)[0]
        for values in ([score for _, score in scored], [row.truth for row, _ in scored])
    )
    order = sorted(range(len(scored)), key=lambda place: -abs(by_score[place] - by_truth[place]))
    chosen: dict[str, tuple[Judged, float]] = {}
    for place in order:
        row, score = scored[place]
        if len(chosen) < MOST_MISJUDGED and abs(by_score[place] - by_truth[place]) > len(scored) / 4:
            chosen.setdefault(row.group, (row, score))
    wanted = {row.id: (row, score) for row, score in chosen.values()}
    said = {one.trajectory_id: one.explanation for one in read_scores(judged.path / "scores-1.parquet")}
    found = {}
    for label, artifact in episodes.items():
        for one in read_trajectories(artifact.path / "trajectories.parquet"):
            name = f"{label}:{one.id}" if len(episodes) > 1 else one.id
            if name in wanted:
                row, score = wanted[name]
                one.reward = score
                found[name] = Misjudged(one, score, row.truth, said.get(name, ""))
    return [found[name] for name in wanted]


def named(target: Any) -> str | None:
    return None if target is None else str(target.target.rpartition(".")[2])
