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
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError, Problem, ResourceError, SpecError
from flows.terminal.arguments import refuse_root_option
from flows.terminal.interrupt import leave

if TYPE_CHECKING:
    from components.evaluation.calibration_page import Calibration
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
    """Measures the declared reward and returns what was found, as JSON data. Raises SpecError, ResourceError, and
    whatever a stage raises."""
    from components.rewards.llm.spec import asked_by
    from flows.calibration.calibration import Work, calibration, check_people, episodes_of_run, named, play, read_people
    from flows.experiment.prerequisites import lacked_by, refuse
    from flows.experiment.requests import Requests
    from flows.stages.base import Context
    from flows.terminal.console import Console, hush, logging_to
    from flows.terminal.interrupt import Interruption

    said = None if people is None else read_people(people)
    if said is not None and spec.calibrate.truth is not None:
        raise SpecError([Problem("calibrate.truth", "is another truth than --people; expected null, or no --people")])
    engines = [spec.inference] if run is None else []
    refuse(lacked_by([*engines, *asked_by(spec.reward), *asked_by(spec.calibrate.truth)], spec.judge.budget))
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
        work = Work(spec, context, console)
        episodes = episodes_of_run(spec, context, run, labels) if run is not None else play(work)
        if said is not None:
            check_people(said, episodes, people)
        judged = work.stage("calibrate", Requests(spec).calibrate(episodes, said))
        truth = "people" if said is not None else named(spec.calibrate.truth) or "success"
        found = calibration(spec, judged, episodes, truth, overrides)
        page, picture = _write(html or root / FOLDER / f"{spec.name}-{judged.key[:8]}.html", found)
        _show(console, found, page)
        where = {"html": str(page), "plot": str(picture), "mlflow_run": _track(spec, found, page)}
        return {**_to_json(found), "key": judged.key, **where}


def _write(path: Path, found: Calibration) -> tuple[Path, Path]:
    """The page, and the picture beside it."""
    from components.evaluation.calibration_page import render
    from components.evaluation.judge_charts import picture

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


def _track(spec: ExperimentSpec, found: Calibration, page: Path) -> str:
    """The figures, the page and the picture in MLflow, as a run of the experiment's; returns its id."""
    from components.tracking.mlflow_tracker import Tracker

    name = f"calibrate {found.reward}"
    tags = {"seed": str(spec.seed), "calibrates": found.reward, "truth": found.truth}
    values = {name: one["value"] for name, one in found.measures.items() if isinstance(one, dict)} | dict(found.counts)
    with Tracker.open(Path(spec.root), spec.tracking, spec.name, tags=tags, run_name=name) as run:
        run.log_metrics({f"calibrate/{name}": value for name, value in values.items() if value is not None})
        run.log_report(page.read_text(encoding="utf-8"), "calibration.html")
        run.log_file(page.with_suffix(".svg"))
        return run.run_id


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where a stage fails, and with --strict where a mark is not met; 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.calibrate", description="Measures the declared reward against the truth."
    )
    parser.add_argument("overrides", nargs="*", help="as for flows.run: +experiment=NAME key=value")
    parser.add_argument("--config-dir", "-cd", help="folder of your own config groups")
    parser.add_argument("--run", help="judge episodes of a run: id, beginning of an id, experiment's name, or latest")
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        help="of its stages, as collect[3]; may be repeated; all evaluations without it",
    )
    parser.add_argument("--people", type=Path, metavar="FILE", help="JSON lines: trajectory_id and score")
    parser.add_argument("--html", type=Path, metavar="FILE", help="where the page goes, the picture beside it")
    parser.add_argument("--strict", action="store_true", help="exit code 1 where a mark (calibrate.marks) is not met")
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    if options.label and options.run is None:
        parser.error("--label goes with --run")
    out = sys.stdout
    from flows.experiment.compose import check
    from flows.terminal.overrides import mask_overrides

    try:
        found = calibrate(
            check(options.overrides, config_dir=options.config_dir, named=True)[0],
            overrides=mask_overrides(options.overrides),
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
