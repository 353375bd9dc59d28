"""What runs left, side by side: read from their records and artifacts, nothing else, and neither is changed.

An artifact that is not below the root any more is read from the store that its run was started with. A run that still
goes on, failed or was killed is compared as far as it got. What is gone from both is missing, and the notes say so.
"""

from __future__ import annotations

import json
import re
import shlex
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact
from components.deployment.card import PLACEMENT
from components.errors import ResourceError
from components.json_text import read_json
from components.specs.target import key_name
from flows.history.records import Records, RunRecord
from flows.history.store_reader import Peek, peek_through, targets

if TYPE_CHECKING:
    from components.evaluation.comparison import Against, Comparison, Run, StageTotal
    from components.evaluation.report import Evaluation

LISTED = 10
"""Scenarios, or stages, that are named where there may be many."""
LETTERS = string.ascii_uppercase
NOT_DECISIVE = PLACEMENT - {"fork"}
"""Keys of a configuration that do not determine results, at any depth. Where a fork begins does."""
MISSING = "–"
_IN_ROUNDS = re.compile(r"evaluate\[\d+\]")
_TRAINED = re.compile(r"train\[\d+\]")


def compare(root: Path, references: Sequence[str]) -> Comparison:
    """The runs below `root` that the references name (as `Records.get` takes them), the first as the baseline.

    Raises ResourceError for fewer than two runs, more than there are letters, a run that does not exist, and one that
    is named twice.
    """
    from components.evaluation.comparison import Comparison

    if not 2 <= len(references) <= len(LETTERS):
        raise ResourceError(f"expected 2 to {len(LETTERS)} runs to compare, not {len(references)}")
    records = Records(root)
    found: dict[str, RunRecord] = {}
    for reference in references:
        run = records.get(reference)
        if run.id in found:
            raise ResourceError(f"run {run.short} ({run.name}) is named twice, the second time as {reference!r}")
        found[run.id] = run
    peeks = {run.id: peek_through(records.root, run.spec.get("store")) for run in found.values()}
    runs = [_run(letter, run, records, peeks[run.id]) for letter, run in zip(LETTERS, found.values(), strict=False)]
    specs = [_with_defaults(run.spec, _resolved_targets(run, peeks[run.id])) for run in found.values()]
    differing = dict(_differing(specs))
    decisive = {path: values for path, values in differing.items() if _decisive(path, specs)}
    return Comparison(
        runs=runs,
        results=_texts(decisive | dict(_differing([_code(run, peeks[run.id]) for run in found.values()]))),
        rest=_texts(
            {path: values for path, values in differing.items() if path not in decisive}
            | dict(_differing([{"git commit": run.git_commit} for run in found.values()]))
        ),
        against=[_against(runs[0], run) for run in runs[1:]],
        created=time.strftime("%Y-%m-%d %H:%M:%S"),
        command=shlex.join(
            ["python", "-m", "flows.compare", *(run.short for run in found.values()), f"root={records.root}"]
        ),
    )


def _run(letter: str, run: RunRecord, records: Records, peek: Peek) -> Run:
    from components.evaluation.comparison import Run

    status = records.status(run)
    notes = [] if status == "finished" else [f"{status}: compared as far as it got, {len(run.stages)} stages"]
    ended = time.time() if status == "running" else run.ended
    gone: list[str] = []
    evaluations = _evaluations(letter, run, peek, notes)
    heldout = _heldout(run, evaluations, peek, notes, gone)
    rounds = _rounds(run, peek, gone)
    if peek.unread:
        notes.append(f"its store cannot be read, so what is only there is missing: {peek.unread}")
    if gone:
        notes.append(f"not in the store any more, or damaged, so that curves are incomplete: {listed(gone)}")
    return Run(
        letter=letter,
        id=run.id,
        name=run.name,
        seed=run.seed,
        status=status,
        started=time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)),
        seconds=None if ended is None else ended - run.started,
        git_commit=run.git_commit or "",
        overrides=[one for one in run.overrides if not one.startswith("root=")],
        evaluations=evaluations,
        rounds=rounds,
        stages=_stages(run),
        heldout=heldout,
        chosen=next((one.step for one in run.notices if one.kind == "best"), None),
        notes=notes,
    )


def _evaluations(letter: str, run: RunRecord, peek: Peek, notes: list[str]) -> dict[str, Evaluation]:
    """Those that the run has finished and the store still holds; what is missing is added to the notes. A run that did
    not get to its end has the last evaluation of its rounds in the place of the final one."""
    from components.evaluation.report import Evaluation
    from components.trajectories.store import load_scored
    from flows.reporting.report import titles_by

    keys = {one.label: one.key for one in run.stages}
    algorithm = str(run.spec.get("algorithm", {}).get("name", ""))
    named = titles_by(algorithm, "evaluate[sft]" in keys)
    titles = {f"evaluate[{name}]": (name, title) for name, title in named.items()}
    chosen = next((one.step for one in run.notices if one.kind == "best"), None)
    if chosen is not None:
        titles["evaluate[final]"] = "final", f"round {chosen} (best)" if chosen else "start of the rounds (best)"
    in_rounds = [one.label for one in run.stages if _IN_ROUNDS.fullmatch(one.label)]
    if "evaluate[final]" not in keys and in_rounds:
        number = in_rounds[-1].partition("[")[2].rstrip("]")
        titles[in_rounds[-1]] = number, f"round {number}"
    found = {}
    for label, (name, title) in titles.items():
        if label not in keys:
            continue
        with peek.opened(keys[label]) as artifact:
            if artifact is None:
                notes.append(f"{label} is not in the store any more, or is damaged: run it again")
                continue
            folder = artifact.path
            try:
                summary = read_json(folder / "summary.json")
                episodes = load_scored(folder / "trajectories.parquet", folder / "scores.parquet", None)
            except (OSError, ValueError) as error:
                notes.append(f"{label} cannot be read: {error}")
                continue
        found[name] = Evaluation(f"{letter} {title}", summary, episodes)
    if not found:
        notes.append("there is no finished evaluation")
    return found


def _heldout(
    run: RunRecord, evaluations: Mapping[str, Evaluation], peek: Peek, notes: list[str], gone: list[str]
) -> dict[int, Mapping[str, Any]]:
    """Summaries of the evaluations by the round after which the policy stood; the untrained model before a warmup is
    left out."""
    found: dict[int, Mapping[str, Any]] = {}
    for one in run.stages:
        stage, _, name = one.label.rstrip("]").partition("[")
        if stage != "evaluate" or one.step < 0:
            continue
        if name in evaluations:
            found[one.step] = evaluations[name].summary
        elif name.isdecimal():
            with peek.opened(one.key) as artifact:
                if artifact is None:
                    gone.append(one.label)
                    continue
                try:
                    found[one.step] = read_json(artifact.path / "summary.json")
                except (OSError, ValueError) as error:
                    notes.append(f"{one.label} cannot be read: {error}")
    return dict(sorted(found.items()))


def _rounds(run: RunRecord, peek: Peek, gone: list[str]) -> dict[int, dict[str, float]]:
    """Figures of each finished round, under the names that the report plots."""
    from flows.reporting.report import round_figures

    rounds: dict[int, dict[str, Artifact]] = {}
    trained = {one.label.partition("[")[2].rstrip("]") for one in run.stages if _TRAINED.fullmatch(one.label)}
    for one in run.stages:
        stage, _, number = one.label.rstrip("]").partition("[")
        if stage == "evaluate" or number not in trained:
            continue
        artifacts = rounds.setdefault(int(number), {})
        artifact = peek.find(one.key)
        if artifact is None:
            gone.append(one.label)
        else:
            artifacts[stage] = artifact
    return {number: round_figures(artifacts) for number, artifacts in sorted(rounds.items())}


def _stages(run: RunRecord) -> dict[str, StageTotal]:
    from components.evaluation.comparison import StageTotal

    totals: dict[str, StageTotal] = {}
    for one in run.stages:
        kind = one.request["stage"]
        before = totals.get(kind, StageTotal())
        totals[kind] = StageTotal(
            before.ran + (one.status != "cached"),
            before.cached + (one.status == "cached"),
            before.seconds + one.waited,
            before.cost + one.cost,
            before.unnoticed + one.unnoticed,
        )
    return totals


def _against(baseline: Run, run: Run) -> Against:
    from components.evaluation.comparison import Against, compare_episodes

    if baseline.last is None or run.last is None:
        lacking = [one.letter for one in (baseline, run) if one.last is None]
        why = f"nothing to compare: {' and '.join(lacking)} without a finished evaluation"
        return Against(run.letter, f"{run.letter} against {baseline.letter}", None, [why])
    title = f"{run.last.label} against {baseline.last.label}"
    found = compare_episodes(run.letter, title, baseline.last.trajectories, run.last.trajectories)
    ours, theirs = list(baseline.evaluations)[-1], list(run.evaluations)[-1]
    if ours == theirs:
        return found
    return replace(found, notes=[f"these are different evaluations, {theirs} and {ours}", *found.notes])


def _code(run: RunRecord, peek: Peek) -> dict[str, Any]:
    """What determines results besides the configuration: versions of stages, and the source of the user's code."""
    found: dict[str, Any] = {}
    for one in run.stages:
        found[f"version of {one.request['stage']}"] = one.version
        manifest = peek.manifest(one.key)
        for target in targets(manifest["spec"] if manifest else {}).values():
            if "source_sha256" in target:
                found[f"source of {target['_target_']}"] = target["source_sha256"][:12]
    return {name: found[name] for name in sorted(found)}


def _resolved_targets(run: RunRecord, peek: Peek) -> list[Mapping[str, Any]]:
    """Return the targets of a run's stages, each with every argument of its signature."""
    manifests = [peek.manifest(stage.key) for stage in run.stages]
    return [target for manifest in manifests if manifest for target in targets(manifest["spec"]).values()]


def _with_defaults(spec: Any, resolved: Sequence[Mapping[str, Any]]) -> Any:
    """Return a spec whose targets state all their arguments, so that a default and the same value that was written down
    are no difference. A target that no stage has resolved stays as it is."""
    if not isinstance(spec, Mapping):
        return spec
    complete: Mapping[str, Any] = {}
    if isinstance(path := spec.get("_target_"), str):
        stated = {**spec, "_target_": key_name(path)}
        complete = next((target for target in resolved if stated.items() <= target.items()), {})
    return {**complete, **{name: _with_defaults(value, resolved) for name, value in spec.items()}}


def _differing(values: Sequence[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """(path, the value in each) of what is not the same in all; `MISSING` where there is none."""
    if all(isinstance(value, Mapping) for value in values):
        for name in dict.fromkeys(name for value in values for name in value):
            yield from _differing([value.get(name, MISSING) for value in values], (*path, name))
    elif any(value != values[0] for value in values):
        yield path, list(values)


def _decisive(path: tuple[str, ...], specs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a key of the configuration determines results. Every argument of a target does."""
    if path[0] in NOT_DECISIVE | {"name"}:
        return False
    levels: list[Any] = list(specs)
    for name in path:
        if any(isinstance(level, Mapping) and "_target_" in level for level in levels):
            return True
        if name in NOT_DECISIVE:
            return False
        levels = [level.get(name) if isinstance(level, Mapping) else None for level in levels]
    return True


def _texts(found: Mapping[tuple[str, ...], Sequence[Any]]) -> dict[str, list[str]]:
    return {
        ".".join(path): [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        for path, values in found.items()
    }


def listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
