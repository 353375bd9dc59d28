r"""`flows.explain calibrate +experiment=NAME [overrides]`: agreement of the declared reward with the ground truth.

    python -m flows.explain calibrate +experiment=quickstart                  play held-out scenarios, judge, measure
    python -m flows.explain calibrate +experiment=quickstart --run latest     use the evaluations of a run
    python -m flows.explain calibrate +experiment=quickstart --run latest --label "collect[3]"
    python -m flows.explain calibrate +experiment=quickstart --run latest --people scores.jsonl
    python -m flows.explain calibrate +experiment=quickstart calibrate.marks.auc=0.8 --strict

The ground truth is the success that the environment reports, the scores of another reward (`calibrate.truth`), or human
scores (--people): a file of lines `{"trajectory_id": ..., "score": ...}`; several scores of an episode are averaged.
Without --run the untrained model plays scenarios of `evaluate.split`, and the environment's reference solutions, if it
has any, are judged as well. `components.evaluation.calibration` defines the measures.

Playing and judging are stages, so a repeated command uses the cache. Standard error gets a table and warnings, standard
output one line of JSON. The page and the plot are written below `<root>/calibrate/` and to MLflow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import Problem, SpecError
from flows.terminal.arguments import refuse_root_option
from flows.terminal.exit_codes import with_exit_codes
from flows.terminal.pages import write_page

if TYPE_CHECKING:
    from components.pages.calibration import Calibration
    from flows.experiment.spec import ExperimentSpec
    from flows.terminal.console import Console

FOLDER = "calibrate"


def calibrate(
    spec: ExperimentSpec,
    *,
    overrides: Sequence[str] = (),
    run: str | None = None,
    labels: Sequence[str] = (),
    people: Path | None = None,
    html: Path | None = None,
) -> dict[str, Any]:
    """Measure the declared reward and return the result as JSON data. Raises SpecError, ResourceError, and errors of
    the stages."""
    from components.rewards.llm.spec import asked_by
    from flows.evaluation.calibration import (
        CalibrationRunner,
        calibration,
        check_people,
        episodes_of_run,
        play,
        read_people,
        target_name,
    )
    from flows.experiment import run_models
    from flows.experiment.prerequisites import check_used
    from flows.experiment.requests import Requests
    from flows.stages.base import Context
    from flows.terminal.console import Console, hush, logging_to
    from flows.terminal.interrupt import Interruption

    human_scores = None if people is None else read_people(people)
    if human_scores is not None and spec.calibrate.truth is not None:
        raise SpecError([Problem("calibrate.truth", "conflicts with --people; expected null, or no --people")])
    spec = run_models.resolve(spec, Context.at(spec.root, spec.store).store)
    engines = [spec.inference] if run is None else []
    judges = [*asked_by(spec.reward), *asked_by(spec.calibrate.truth)]
    check_used(spec, engines, judges)
    hush()
    with ExitStack() as stack:
        stack.enter_context(Interruption())
        stack.enter_context(redirect_stdout(sys.stderr))  # stdout carries the result only
        root = Path(spec.root)
        context = Context.created(root, spec.store, lock_timeout=spec.compute.lock_timeout, seed=spec.seed)
        context.store.check()
        stack.callback(context.warm.close)
        console = Console()
        log = root / "logs" / f"calibrate-{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        stack.enter_context(logging_to(log, console))
        work = CalibrationRunner(spec, context, console)
        episodes = episodes_of_run(spec, context, run, labels) if run is not None else play(work)
        if human_scores is not None:
            check_people(human_scores, episodes, people)
        artifact = work.stage("calibrate", Requests(spec).calibrate(episodes, human_scores))
        truth = "people" if human_scores is not None else target_name(spec.calibrate.truth) or "success"
        result = calibration(spec, artifact, episodes, truth, overrides)
        page, plot = _write(html or root / FOLDER / f"{spec.name}-{artifact.key[:8]}.html", result)
        _show(console, result, page)
        outputs = {"html": str(page), "plot": str(plot), "mlflow_run": _track(spec, result, page)}
        return {**_to_json(result), "key": artifact.key, **outputs}


def _write(path: Path, result: Calibration) -> tuple[Path, Path]:
    """Write the page and the plot; return their paths."""
    from components.pages.calibration import render
    from components.pages.charts import picture

    plot = picture(result.charts(), f"{result.reward} against {result.truth}")
    return write_page(path, render(result)), write_page(path.with_suffix(".svg"), plot)


def _show(console: Console, result: Calibration, page: Path) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    from components.pages.calibration import MEASURES

    size = f"{result.measures['episodes']} episodes of {result.measures['groups']} scenarios"
    table = Table(title=f"{result.reward} against {result.truth}: {size}", box=SIMPLE, title_justify="left")
    for name in ("measure", "value", "95 %"):
        table.add_column(name, justify="left" if name == "measure" else "right")
    for name in MEASURES:
        measure = result.measures[name]
        interval = "" if measure["low"] is None else f"[{measure['low']:.3f}, {measure['high']:.3f}]"
        table.add_row(name, "–" if measure["value"] is None else f"{measure['value']:.3f}", interval)
    for name, value in result.counts.items():
        table.add_row(name, "unknown" if value is None else f"{value:.4g}", "")
    console.table(table)
    for warning in result.warnings:
        console.line(f"warning: {warning}")
    console.line(f"page: {page}")


def _to_json(result: Calibration) -> dict[str, Any]:
    return {
        "experiment": result.experiment,
        "reward": result.reward,
        "truth": result.truth,
        **result.measures,
        **result.counts,
        "marks": {mark.measure: {"mark": mark.value, "found": mark.measured, "met": mark.met} for mark in result.marks},
        "warnings": list(result.warnings),
    }


def _track(spec: ExperimentSpec, result: Calibration, page: Path) -> str:
    """Log the measures, the page and the plot to MLflow as a run of the experiment. Return the MLflow run's id."""
    from components.tracking.mlflow_tracker import Tracker

    name = f"calibrate {result.reward}"
    tags = {"seed": str(spec.seed), "calibrates": result.reward, "truth": result.truth}
    values = {name: measure["value"] for name, measure in result.measures.items() if isinstance(measure, dict)}
    values |= dict(result.counts)
    with Tracker.open(Path(spec.root), spec.tracking, spec.name, tags=tags, run_name=name) as run:
        run.log_metrics({f"calibrate/{name}": value for name, value in values.items() if value is not None})
        run.log_report(page.read_text(encoding="utf-8"), "calibration.html")
        run.log_file(page.with_suffix(".svg"))
        return run.run_id


@with_exit_codes
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 1 if a stage fails or, with --strict, a mark is not met; 2 for a user error;
    130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.explain calibrate", description="Measures the declared reward against the ground truth."
    )
    parser.add_argument("overrides", nargs="*", help="as for flows.run: +experiment=NAME key=value")
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    parser.add_argument("--run", help="judge episodes of a run: id, prefix of an id, experiment's name, or latest")
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        help="with --run: stage of the run, such as collect[3]; may be repeated (default: all its evaluations)",
    )
    parser.add_argument("--people", type=Path, metavar="FILE", help="human scores: JSON lines, trajectory_id and score")
    parser.add_argument("--html", type=Path, metavar="FILE", help="file of the page; the plot is written next to it")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a mark (calibrate.marks) is not met")
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    if options.label and options.run is None:
        parser.error("--label requires --run")
    out = sys.stdout
    from flows.experiment.compose import check
    from flows.terminal.overrides import mask_overrides

    result = calibrate(
        check(options.overrides, config_dir=options.config_dir, named=True)[0],
        overrides=mask_overrides(options.overrides),
        run=options.run,
        labels=options.label,
        people=options.people,
        html=options.html,
    )
    print(json.dumps(result), file=out, flush=True)
    unmet = [name for name, mark in result["marks"].items() if not mark["met"]]
    return 1 if options.strict and unmet else 0
