"""Side-by-side comparison of runs, read-only, from their records and artifacts.

An artifact that is no longer below the root is read from the store that its run was configured with. A run that is
still running, failed or was killed is compared as far as it got. The notes name data that is missing from both places.
"""

from __future__ import annotations

import re
import shlex
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact
from components.errors import ResourceError
from components.json_text import read_json
from flows.history.code import CodeRecords
from flows.history.records import Records, RunRecord
from flows.history.store_reader import StoreReader
from flows.history.trust import recorded_reader
from flows.reporting.settings import CODE, MISSING, as_texts, code_texts, differing, setting_differences
from flows.reporting.sides import (
    Side,
    check_settings,
    pairs_of_sides,
    sides_by_setting,
    verdicts_of_runs,
    verdicts_of_sides,
)
from flows.stages import ROUND_STAGES

if TYPE_CHECKING:
    from components.pages.comparison import BaselineComparison, ComparedRun, RunComparison, StageTotal
    from components.pages.report import Evaluation

LISTED = 10
"""Maximum number of scenarios or stages listed by name."""
LETTERS = string.ascii_uppercase
_IN_ROUNDS = re.compile(r"evaluate\[\d+\]")
_TRAINED = re.compile(r"train\[\d+\]")


def compare(
    root: Path,
    references: Sequence[str],
    sides: Mapping[str, Sequence[str]] | None = None,
    trust: bool = False,
) -> RunComparison:
    """Compare runs below `root`; the first one is the baseline. references: as accepted by `Records.get`. sides: of the
    references by name; None: as the settings and seeds of the runs give them. trust: read the runs' stores.

    Raises ResourceError for fewer than two runs, more runs than letters, an unknown run, a repeated run, and sides that
    mix settings.
    """
    from components.pages.comparison import RunComparison

    if not 2 <= len(references) <= len(LETTERS):
        raise ResourceError(f"expected 2 to {len(LETTERS)} runs to compare, not {len(references)}")
    records = Records(root)
    by_id: dict[str, RunRecord] = {}
    for reference in references:
        run = records.get(reference)
        if run.id in by_id:
            raise ResourceError(f"run {run.short} ({run.name}) is given twice, the second time as {reference!r}")
        by_id[run.id] = run
    readers = {run.id: recorded_reader(records.root, run, trust) for run in by_id.values()}
    settings = setting_differences(list(by_id.values()), list(readers.values()))
    results = as_texts(settings.relevant | settings.versions)
    members = _members(sides, results, list(by_id.values()))
    letters = {id: f"{name}{number}" for name, ids in members.items() for number, id in enumerate(ids, 1)}
    letters = letters or dict(zip(by_id, LETTERS, strict=False))
    runs = [compared_run(letters[id], run, records, readers[id]) for id, run in by_id.items()]
    grouped = [Side(name, [run for run in runs if run.id in ids]) for name, ids in members.items()]
    pairs = pairs_of_sides(grouped) if grouped else [(runs[0], run) for run in runs[1:]]
    against = [_against(*pair) for pair in pairs]
    return RunComparison(
        runs=runs,
        results=results,
        rest=as_texts(
            settings.neutral
            | dict(differing([{"git commit": run.git_commit} for run in by_id.values()]))
            | dict(differing(code_texts(CodeRecords(records.root), list(by_id.values()))))
        ),
        against=against,
        verdicts=verdicts_of_sides(grouped) if grouped else verdicts_of_runs(runs, against),
        created=time.strftime("%Y-%m-%d %H:%M:%S"),
        command=shlex.join(["python", "-m", "flows.compare", *_arguments(sides, by_id), f"root={records.root}"]),
    )


def _members(
    sides: Mapping[str, Sequence[str]] | None, results: Mapping[str, Sequence[str]], runs: Sequence[RunRecord]
) -> dict[str, list[str]]:
    """Return the ids of the runs of each side by name; empty if the runs are compared one by one. results: differences
    that affect results, with the value of each run. Raises ResourceError for a stated side that mixes settings."""
    settings = {key: values for key, values in results.items() if key not in ("seed", "seeds")}
    for key in [key for key, values in settings.items() if key.startswith(CODE) and MISSING in values]:
        del settings[key]  # an unfinished run lacks stages
    if sides is not None:
        check_settings({name: len(ids) for name, ids in sides.items()}, settings, runs)
        ids = iter(run.id for run in runs)
        return {name: [next(ids) for _ in references] for name, references in sides.items()}
    rows = [tuple(values[index] for values in settings.values()) for index in range(len(runs))]
    groups = sides_by_setting(rows, [run.seed for run in runs]) or []
    return {LETTERS[number]: [runs[index].id for index in group] for number, group in enumerate(groups)}


def _arguments(sides: Mapping[str, Sequence[str]] | None, runs: Mapping[str, RunRecord]) -> list[str]:
    """Return the runs as arguments of the command."""
    ids = iter(run.short for run in runs.values())
    if sides is None:
        return list(ids)
    return [f"{name}={','.join(next(ids) for _ in references)}" for name, references in sides.items()]


def compared_run(letter: str, run: RunRecord, records: Records, reader: StoreReader) -> ComparedRun:
    """Return a run with its evaluations, as far as it got."""
    from components.pages.comparison import ComparedRun

    status = records.status(run)
    notes = [] if status == "finished" else [f"{status}: compared as far as it got, {len(run.stages)} stages"]
    ended = time.time() if status == "running" else run.ended
    missing: list[str] = []
    evaluations = _evaluations(letter, run, reader, notes)
    validations = _validations(run, reader, missing)
    if not evaluations and not validations:
        notes.append("there is no finished evaluation")
    heldout = _heldout(run, evaluations, reader, notes, missing)
    rounds = _rounds(run, reader, missing)
    if reader.unread:
        notes.append(f"its store cannot be read, so artifacts that only it has are missing: {reader.unread}")
    if missing:
        notes.append(f"no longer in the store, or damaged, so curves are incomplete: {join_names(missing)}")
    return ComparedRun(
        letter=letter,
        id=run.id,
        name=run.name,
        seed=run.seed,
        status=status,
        started=time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)),
        seconds=None if ended is None else ended - run.started,
        git_commit=run.git_commit or "",
        overrides=[override for override in run.overrides if not override.startswith("root=")],
        evaluations=evaluations,
        rounds=rounds,
        stages=_stages(run),
        heldout=heldout,
        validations=validations,
        chosen=next((notice.step for notice in run.notices if notice.kind == "best"), None),
        notes=notes,
    )


def _evaluations(letter: str, run: RunRecord, reader: StoreReader, notes: list[str]) -> dict[str, Evaluation]:
    """Return the run's finished evaluations that are still in the store; missing ones are added to the notes.

    For a run that did not finish, the last evaluation within its rounds replaces the final one.
    """
    from components.pages.report import Evaluation
    from components.trajectories.stored import StoredTrajectories
    from flows.reporting.report import titles_by

    keys = {stage.label: stage.key for stage in run.stages}
    algorithm = str(run.spec.get("algorithm", {}).get("name", ""))
    title_by_name = titles_by(algorithm, "evaluate[sft]" in keys)
    titles = {f"evaluate[{name}]": (name, title) for name, title in title_by_name.items()}
    best = next((notice.step for notice in run.notices if notice.kind == "best"), None)
    if best is not None:
        titles["evaluate[final]"] = "final", f"round {best} (best)" if best else "start of the rounds (best)"
    in_rounds = [stage.label for stage in run.stages if _IN_ROUNDS.fullmatch(stage.label)]
    if "evaluate[final]" not in keys and in_rounds:
        number = in_rounds[-1].partition("[")[2].rstrip("]")
        titles[in_rounds[-1]] = number, f"round {number}"
    evaluations = {}
    for label, (name, title) in titles.items():
        if label not in keys:
            continue
        with reader.opened(keys[label]) as artifact:
            if artifact is None:
                notes.append(f"{label} is no longer in the store, or is damaged: run it again")
                continue
            try:
                summary = read_json(artifact.path / "summary.json")
                stored = StoredTrajectories(artifact.path)
                stored.columns  # noqa: B018  read now, so that a file that cannot be read is a note
                episodes = stored if reader.holds(keys[label]) else list(stored)
            except (OSError, ValueError) as error:
                notes.append(f"{label} cannot be read: {error}")
                continue
        evaluations[name] = Evaluation(f"{letter} {title}", summary, episodes)
    return evaluations


def _validations(run: RunRecord, reader: StoreReader, missing: list[str]) -> dict[str, dict[str, float]]:
    """Return the metrics of held-out rows of imported data, `before` and `after` the training on it. Labels of missing
    artifacts are added to `missing`."""
    keys = {stage.label: stage.key for stage in run.stages}
    validations = {}
    for name in ("before", "after"):
        if (label := f"validate[{name}]") in keys:
            with reader.opened(keys[label]) as artifact:
                if artifact is None:
                    missing.append(label)
                else:
                    validations[name] = dict(artifact.metrics)
    return validations


def _heldout(
    run: RunRecord, evaluations: Mapping[str, Evaluation], reader: StoreReader, notes: list[str], missing: list[str]
) -> dict[int, Mapping[str, Any]]:
    """Return the summaries of the evaluations by round of the evaluated policy, without the untrained model before a
    warmup. Labels of missing evaluations are added to `missing`."""
    summaries: dict[int, Mapping[str, Any]] = {}
    for stage in run.stages:
        kind, _, name = stage.label.rstrip("]").partition("[")
        if kind != "evaluate" or stage.step < 0:
            continue
        if name in evaluations:
            summaries[stage.step] = evaluations[name].summary
        elif name.isdecimal():
            with reader.opened(stage.key) as artifact:
                if artifact is None:
                    missing.append(stage.label)
                    continue
                try:
                    summaries[stage.step] = read_json(artifact.path / "summary.json")
                except (OSError, ValueError) as error:
                    notes.append(f"{stage.label} cannot be read: {error}")
    return dict(sorted(summaries.items()))


def _rounds(run: RunRecord, reader: StoreReader, missing: list[str]) -> dict[int, dict[str, float]]:
    """Return the metrics of each finished round, with the names that the report plots. Labels of missing stages are
    added to `missing`."""
    from flows.reporting.report import round_figures

    rounds: dict[int, dict[str, Artifact]] = {}
    trained = {stage.label.partition("[")[2].rstrip("]") for stage in run.stages if _TRAINED.fullmatch(stage.label)}
    for stage in run.stages:
        kind, _, number = stage.label.rstrip("]").partition("[")
        if kind not in ROUND_STAGES or number not in trained:
            continue
        artifacts = rounds.setdefault(int(number), {})
        artifact = reader.find(stage.key)
        if artifact is None:
            missing.append(stage.label)
        else:
            artifacts[kind] = artifact
    return {number: round_figures(artifacts) for number, artifacts in sorted(rounds.items())}


def _stages(run: RunRecord) -> dict[str, StageTotal]:
    from components.pages.comparison import StageTotal

    totals: dict[str, StageTotal] = {}
    for stage in run.stages:
        kind = stage.request["stage"]
        total = totals.get(kind, StageTotal())
        totals[kind] = StageTotal(
            total.ran + (stage.status != "cached"),
            total.cached + (stage.status == "cached"),
            total.seconds + stage.waited,
            total.cost + stage.cost,
            total.overlapped_seconds + stage.overlapped_seconds,
        )
    return totals


def _against(baseline: ComparedRun, run: ComparedRun) -> BaselineComparison:
    from components.pages.comparison import BaselineComparison, compare_episodes

    if baseline.last is None or run.last is None:
        lacking = [record.letter for record in (baseline, run) if record.last is None]
        reason = f"nothing to compare: {' and '.join(lacking)} without a finished evaluation"
        return BaselineComparison(
            run.letter, f"{run.letter} against {baseline.letter}", None, [reason], baseline=baseline.letter
        )
    title = f"{run.last.label} against {baseline.last.label}"
    against = compare_episodes((baseline.letter, run.letter), title, baseline.last, run.last)
    baseline_name, name = list(baseline.evaluations)[-1], list(run.evaluations)[-1]
    if baseline_name == name:
        return against
    return replace(against, notes=[f"these are different evaluations, {name} and {baseline_name}", *against.notes])


def join_names(names: Sequence[str]) -> str:
    """Return the names separated by commas, at most `LISTED` of them."""
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
