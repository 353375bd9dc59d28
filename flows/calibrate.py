r"""`python -m flows.calibrate +experiment=NAME [overrides]`: how far the declared reward can be trusted.

    python -m flows.calibrate +experiment=quickstart                      plays held-out scenarios, judges, measures
    python -m flows.calibrate +experiment=quickstart --run latest         the evaluations of a run
    python -m flows.calibrate +experiment=quickstart --run latest --label "collect[3]"
    python -m flows.calibrate +experiment=quickstart --run latest --people scores.jsonl
    python -m flows.calibrate +experiment=quickstart calibrate.marks.auc=0.8 --strict

The truth is the success that the environment states, the scores of another reward (`calibrate.truth`), or what people
say: a file of lines `{"trajectory_id": ..., "score": ...}`, several of one episode count by their mean. Without --run
the model as it is plays scenarios of `evaluate.split`, and the environment's own solutions are judged beside them where
it has any. What is measured, `components.evaluation.calibration` says.

Playing and judging are stages: the same command finds them. Standard error gets a table and warnings, standard output
one line of JSON; the page and the picture lie below `<root>/calibrate/`, and with MLflow.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError, Problem, ResourceError, SpecError
from flows.interrupt import leave

if TYPE_CHECKING:
    from components.artifacts import Artifact
    from components.evaluation.calibration import Judged, Mark
    from components.evaluation.calibration_page import Calibration, Misjudged
    from flows.console import Console
    from flows.spec import ExperimentSpec
    from flows.stages.base import Context, Request

logger = logging.getLogger(__name__)

FOLDER = "calibrate"
MOST_MISJUDGED = 6
"""Episodes on the page."""


@dataclass
class _Work:
    """Stages of this command."""

    spec: ExperimentSpec
    context: Context
    console: Console

    def stage(self, label: str, request: Request) -> Artifact:
        from flows.console import duration
        from flows.execution import UNITS
        from flows.stages.execute import run_stage

        start = time.monotonic()
        with self.console.stage(label, UNITS.get(request.stage, "scores")) as view:
            artifact, status = run_stage(request, replace(self.context, progress=view))
        self.console.line(f"{label} {status} in {duration(time.monotonic() - start)}")
        return artifact


def calibrate(
    spec: ExperimentSpec,
    *,
    overrides: Sequence[str] = (),
    run: str | None = None,
    labels: Sequence[str] = (),
    people: Path | None = None,
    html: Path | None = None,
) -> dict[str, Any]:
    """Measures the declared reward and returns what was found, as JSON data. Raises SpecError, ResourceError, and
    whatever a stage raises."""
    from flows.console import Console, hush, logging_to
    from flows.interrupt import Interruption
    from flows.requests import Requests
    from flows.stages.base import Context

    said = None if people is None else read_people(people)
    if said is not None and spec.calibrate.truth is not None:
        raise SpecError([Problem("calibrate.truth", "is another truth than --people; expected null, or no --people")])
    hush()
    with ExitStack() as stack:
        stack.enter_context(Interruption())
        stack.enter_context(redirect_stdout(sys.stderr))  # what libraries print is no result
        root = Path(spec.root)
        root.mkdir(parents=True, exist_ok=True)
        context = Context.at(root, spec.store, lock_timeout=spec.compute.lock_timeout, seed=spec.seed)
        context.store.check()
        stack.callback(context.warm.close)
        console = Console()
        log = root / "logs" / f"calibrate-{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        stack.enter_context(logging_to(log, console))
        work = _Work(spec, context, console)
        episodes = _of_run(spec, context, run, labels) if run is not None else _played(work)
        if said is not None:
            _check_people(said, episodes, people)
        judged = work.stage("calibrate", Requests(spec).calibrate(episodes, said))
        truth = "people" if said is not None else _named(spec.calibrate.truth) or "success"
        found = _calibration(spec, judged, episodes, truth, overrides)
        page, picture = _write(html or root / FOLDER / f"{spec.name}-{judged.key[:8]}.html", found)
        _show(console, found, page)
        return {**_to_json(found), "key": judged.key, "html": str(page), "plot": str(picture), **_track(spec, found, page)}


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


def _check_people(said: Mapping[str, float], episodes: Mapping[str, Artifact], path: Path | None) -> None:
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


def _of_run(spec: ExperimentSpec, context: Context, run: str, labels: Sequence[str]) -> dict[str, Artifact]:
    """The episodes of stages of a run, by label; of its evaluations, where no label is given."""
    from flows.records import Records

    record = Records(spec.root).get(run)
    chosen = [record.stage(label) for label in labels] or [one for one in record.stages if one.kind == "evaluation"]
    found: dict[str, Artifact] = {}
    for one in chosen:
        if one.kind not in ("evaluation", "trajectories"):
            raise ResourceError(f"--label {one.label}: has no episodes; expected one such as collect[1] or evaluate[final]")
        artifact = context.store.find(one.key)
        if artifact is None:
            raise ResourceError(f"{one.label} of run {record.short} is no longer in {context.store.root}; run it again")
        if artifact.key not in {other.key for other in found.values()}:
            found[one.label] = artifact
    if not found:
        raise ResourceError(f"run {record.short} has no evaluation yet; choose a collection with --label")
    return found


def _played(work: _Work) -> dict[str, Artifact]:
    """Episodes of the held-out split, by the model as it is and by the environment's own solver."""
    from components.inference.spec import RemoteSpec
    from components.models.weights import check_weights
    from flows.requests import Requests
    from flows.stages.episodes import scenarios_of

    spec, requests = work.spec, Requests(work.spec)
    if isinstance(spec.inference, RemoteSpec):
        spec.inference.key()
    check_weights(spec.model, work.context.cache)
    most = len(scenarios_of(spec.environment, spec.evaluate.split, work.context))
    count = min(spec.calibrate.scenarios, most)
    solved = spec.calibrate.solutions
    if solved is None:
        solved = "solve" in dir(spec.environment.factory())
    found = {"policy": work.stage("collect[policy]", requests.collect_heldout("policy", count))}
    if solved:
        found["solver"] = work.stage("collect[solver]", requests.collect_heldout("solver", count))
    return found


def _calibration(
    spec: ExperimentSpec, judged: Artifact, episodes: Mapping[str, Artifact], truth: str, overrides: Sequence[str]
) -> Calibration:
    from components.evaluation import calibration as measures
    from components.evaluation.calibration_page import Calibration
    from flows.stages.calibrate import TABLE

    rows = [measures.Judged(**row) for row in json.loads((judged.path / TABLE).read_text())]
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
    marks = measures.judge_by(spec.calibrate.marks.asked(), values)
    return Calibration(
        experiment=spec.name,
        reward=spec.reward.target.rpartition(".")[2],
        truth=truth,
        measures=found,
        counts=counts,
        curve=measures.curve(rows),
        roc=measures.roc(rows, found["threshold"]),
        marks=marks,
        warnings=_warnings(found, marks, {row.truth for row in rows}),
        misjudged=_misjudged(rows, judged, episodes),
        created=time.strftime("%Y-%m-%d %H:%M:%S"),
        config=spec.reward.model_dump(mode="json"),
        overrides=overrides,
    )


def _warnings(found: Mapping[str, Any], marks: Sequence[Mark], truths: set[float]) -> list[str]:
    """What has to be said of a judge, asked or not."""
    said = [f"the judge is worse than its mark: {mark}" for mark in marks if not mark.met]
    auc = found["auc"]
    if not found["episodes"]:
        said.append("no episode has both a score and a truth: nothing can be told")
    elif len(truths) == 1:
        said.append(
            f"the truth is {min(truths):g} for all {found['episodes']} episodes: nothing can be told of the judge. Take "
            "episodes of which some are good: --run RUN, or more of them (calibrate.scenarios)"
        )
    elif auc["value"] is not None and (auc["value"] <= 0.5 or (auc["low"] or 0.0) <= 0.5):
        at = "" if auc["low"] is None else f" [{auc['low']:.3f}, {auc['high']:.3f}]"
        said.append(f"the judge cannot be told from chance: auc {auc['value']:.3f}{at}")
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


def _named(target: Any) -> str | None:
    return None if target is None else str(target.target.rpartition(".")[2])


def _write(path: Path, found: Calibration) -> tuple[Path, Path]:
    """The page, and the picture beside it."""
    from components.evaluation.calibration_page import render
    from components.evaluation.plane import picture

    image = path.with_suffix(".svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(found), encoding="utf-8")
        image.write_text(picture(found.charts(), f"{found.reward} against {found.truth}"), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}; give another file: --html FILE") from None
    return path.absolute(), image.absolute()


def _show(console: Console, found: Calibration, page: Path) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    from components.evaluation.calibration_page import MEASURES

    what = f"{found.measures['episodes']} episodes of {found.measures['groups']} scenarios"
    table = Table(title=f"{found.reward} against {found.truth}: {what}", box=SIMPLE, title_justify="left")
    for name in ("measure", "value", "95 %"):
        table.add_column(name, justify="left" if name == "measure" else "right")
    for name in MEASURES:
        one = found.measures[name]
        interval = "" if one["low"] is None else f"[{one['low']:.3f}, {one['high']:.3f}]"
        table.add_row(name, "–" if one["value"] is None else f"{one['value']:.3f}", interval)
    for name, value in found.counts.items():
        table.add_row(name, "unknown" if value is None else f"{value:.4g}", "")
    console.table(table)
    for warning in found.warnings:
        console.line(f"warning: {warning}")
    console.line(f"page: {page}")


def _to_json(found: Calibration) -> dict[str, Any]:
    return {
        "experiment": found.experiment,
        "reward": found.reward,
        "truth": found.truth,
        **found.measures,
        **found.counts,
        "marks": {one.measure: {"mark": one.value, "found": one.found, "met": one.met} for one in found.marks},
        "warnings": list(found.warnings),
    }


def _track(spec: ExperimentSpec, found: Calibration, page: Path) -> dict[str, str]:
    """The figures, the page and the picture in MLflow, as a run of the experiment's."""
    from components.tracking.mlflow_tracker import Tracker

    tags = {"seed": str(spec.seed), "calibrates": found.reward, "truth": found.truth}
    values = {name: one["value"] for name, one in found.measures.items() if isinstance(one, dict)} | dict(found.counts)
    with Tracker.open(Path(spec.root), spec.tracking, spec.name, tags=tags, run_name=f"calibrate {found.reward}") as run:
        run.log_metrics({f"calibrate/{name}": value for name, value in values.items() if value is not None})
        run.log_report(page.read_text(encoding="utf-8"), "calibration.html")
        run.log_file(page.with_suffix(".svg"))
        return {"mlflow_run": run.run_id}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where a stage fails, and with --strict where a mark is not met; 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.calibrate", description="Measures the declared reward against the truth."
    )
    parser.add_argument("overrides", nargs="*", help="as for flows.run: +experiment=NAME key=value")
    parser.add_argument("--config-dir", "-cd", help="folder of your own config groups")
    parser.add_argument("--run", help="judge episodes of a run: id, beginning of an id, experiment's name, or latest")
    parser.add_argument(
        "--label", action="append", default=[], help="of its stages, as collect[3]; may be repeated; all evaluations without"
    )
    parser.add_argument("--people", type=Path, metavar="FILE", help="JSON lines: trajectory_id and score")
    parser.add_argument("--html", type=Path, metavar="FILE", help="where the page goes, the picture beside it")
    parser.add_argument("--strict", action="store_true", help="exit code 1 where a mark (calibrate.marks) is not met")
    options = parser.parse_intermixed_args(argv)
    if options.label and options.run is None:
        parser.error("--label goes with --run")
    out = sys.stdout
    from flows.config import check

    try:
        found = calibrate(
            check(options.overrides, config_dir=options.config_dir)[0],
            overrides=options.overrides,
            run=options.run,
            labels=options.label,
            people=options.people,
            html=options.html,
        )
    except (SpecError, ResourceError) as error:
        print(error, file=sys.stderr)
        return 2
    except EspalierError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(found), file=out, flush=True)
    unmet = [name for name, mark in found["marks"].items() if not mark["met"]]
    return 1 if options.strict and unmet else 0


if __name__ == "__main__":
    leave(main)
