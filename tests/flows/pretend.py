"""Runs for tests: those that only pretend, with real specs, requests, keys, artifacts and records, whose stages compute
nothing; and real ones in this process."""

from __future__ import annotations

import io
import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.artifacts import Artifact
from components.evaluation.metrics import summarise
from components.specs import validate
from components.trajectories.schema import Scenario, Score, Selection, Trajectory
from components.trajectories.store import write_scores, write_selection, write_trajectories
from flows.execution.executor import Execution
from flows.experiment.spec import ExperimentSpec
from flows.experiment.starting_point import StartingPoint
from flows.history.records import RunRecord, StageRecord, recording
from flows.planning.plan import plan
from flows.planning.run_plan import PlannedStage
from flows.recipes.outcome import RunOutcome
from flows.recipes.run import Run
from flows.stages import STAGES
from flows.stages.base import Context, Request
from flows.stages.execute import key_part, request_key, run_stage
from flows.terminal.console import Console
from tests.flows.test_online_rl import DATA


def _episode(numbered: tuple[int, str]) -> Trajectory:
    name = f"scenario-{numbered[0]:02}"
    return Trajectory(name, Scenario(name, {}, "heldout"), 0, [], outcome={"success": numbered[1] == "+"})


class Interrupted(Exception):
    """The run came to the label at which it was to stop."""


def spec_of(root: Path, **changes: Any) -> ExperimentSpec:
    return validate(ExperimentSpec, {**DATA, "root": str(root), **changes})


def planned(root: Path, **changes: Any) -> dict[str, PlannedStage]:
    """The stages in the plan of the test experiment with these changes, by label."""
    return {stage.label: stage for stage in plan(spec_of(root, **changes)).stages}


def edit_manifest(root: Path, stage: StageRecord, **values: Any) -> None:
    """Replace values in the manifest of a stage's artifact."""
    path = root / "artifacts" / stage.key / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def pretend(
    root: Path,
    *,
    stop_at: str | None = None,
    metrics: dict[str, dict[str, float]] | None = None,
    episodes: Mapping[str, str | Sequence[Trajectory]] | None = None,
    files: Mapping[str, Callable[[Path], object]] | None = None,
    cost: float = 0.0,
    git_commit: str | None = None,
    overrides: Sequence[str] = (),
    real: Collection[str] = (),
    **changes: Any,
) -> RunRecord:
    """A run of the test experiment with these changes. metrics: by label, of its artifact. stop_at: a label at which it
    is stopped. episodes: by label of an evaluation, what it played, or what its scenarios came to, `+` success, `-`
    none; it then has the files of a real one. files: by label, writes further files into its artifact. cost: of each
    stage that runs. real: stages that do compute."""
    spec = spec_of(root, **changes)
    context = Context.at(root)
    start = StartingPoint.resolve(spec, context.store)
    run = RunRecord(
        uuid.uuid4().hex,
        spec.name,
        spec.seed,
        time.time(),
        spec=spec.model_dump(mode="json", by_alias=True),
        overrides=list(overrides),
        git_commit=git_commit,
        forked=start.checkpoints,
    )
    try:
        with recording(root, run) as writer:

            def call(label: str, step: int, request: Request) -> Artifact:
                if label == stop_at:
                    raise Interrupted
                stage = STAGES[request.stage]
                key = request_key(request, context)
                status = "cached"
                if request.stage in real:
                    _, status = run_stage(request, context)
                elif context.store.find(key) is None:
                    status = "ran"
                    inputs = {name: context.store.find(one) for name, one in request.inputs.items()}
                    with context.store.draft(
                        key,
                        stage=stage.name,
                        kind=stage.kind,
                        schema_version=stage.schema_version,
                        inputs=inputs,  # type: ignore[arg-type]
                        spec=key_part(request),
                    ) as draft:
                        (draft.path / "data").write_text(key)
                        if files and label in files:
                            files[label](draft.path)
                        played = (episodes or {}).get(label)
                        if isinstance(played, str):
                            draft.metrics["success"] = played.count("+") / len(played)
                            played = [_episode(one) for one in enumerate(played)]
                        draft.metrics.update((metrics or {}).get(label, {}))
                        if played:
                            write_evaluation(draft.path, played)
                artifact = context.store.find(key)
                assert artifact is not None
                spent = cost if status == "ran" else 0.0
                record = StageRecord(
                    label, step, request.to_json(), stage.version, key, artifact.digest, stage.kind, status, 1.0, spent
                )
                writer.add(record)
                return artifact

            Run(spec, call, start=start, on_notice=writer.note).execute()
    except Interrupted:
        pass
    return writer.run


def run_stages(spec: ExperimentSpec) -> tuple[RunRecord, RunOutcome]:
    """Run the stages of an experiment in this process, with a record, but without Prefect and MLflow."""
    root, context = Path(spec.root), Context.at(spec.root)
    start = StartingPoint.resolve(spec, context.store)
    data = spec.model_dump(mode="json", by_alias=True)
    run = RunRecord(uuid.uuid4().hex, spec.name, spec.seed, time.time(), spec=data, forked=start.checkpoints)
    with recording(root, run) as writer:
        execution = Execution(spec, context, Console(io.StringIO()), None, root / "log", writer)
        outcome = Run(spec, execution.artifact, start=start).execute()
        execution.close()
    context.warm.close()
    return writer.run, outcome


def write_evaluation(folder: Path, episodes: Sequence[Trajectory]) -> None:
    """The files of an evaluation that played these episodes."""
    write_trajectories(folder / "trajectories.parquet", episodes)
    write_scores(folder / "scores.parquet", [Score(one.id, one.reward) for one in episodes])
    (folder / "summary.json").write_text(json.dumps(summarise(episodes)))


def store_episodes(
    context: Context,
    episodes: Sequence[Trajectory],
    scores: Sequence[Score] | None = None,
    selections: Sequence[Selection] | None = None,
) -> dict[str, str]:
    """Store episodes, with their scores and selections, as artifacts of stages. Return their keys, the inputs of a
    request."""
    parts: dict[str, Callable[[Path], object]] = {"trajectories": lambda path: write_trajectories(path, episodes)}
    if scores is not None:
        parts["scores"] = lambda path: write_scores(path, scores)
    if selections is not None:
        parts["selection"] = lambda path: write_selection(path, selections)
    for kind, write in parts.items():
        with context.store.draft(kind, stage="made", kind=kind, schema_version=1, inputs={}) as draft:
            write(draft.path / f"{kind}.parquet")
    return {kind: kind for kind in parts}
