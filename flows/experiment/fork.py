"""A fork: a run that begins at a step of another one, `fork=RUN@STEP`.

The policy of that step is where its rounds begin; the warmup and the rounds up to STEP are the other run's. Everything
else is the new run's own: another algorithm, reward or learning rate goes on from the same policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.artifacts import Artifact, Store
from components.deployment.card import placeless
from components.errors import Problem, SpecError
from components.redaction import mask
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Records, RunRecord, checkpoints
from flows.stages.train import FED


@dataclass(frozen=True)
class Fork:
    """Where a run begins."""

    run: RunRecord
    step: int
    """Rounds that the policy has been through."""
    checkpoint: Artifact
    reference: Artifact | None
    """The checkpoint from which the other run's rounds began; None for the base model."""
    checkpoints: dict[str, str]
    """Step and key of what it begins with, and of what came before that, for its record."""
    earlier: list[dict[str, Artifact]]
    """Trajectories, scores and selection of the other run's last rounds up to there, the nearest first: as many as the
    new run replays."""
    anchored: list[dict[str, Artifact]]
    """The same, its warmup included: as many as elastic weight consolidation looks at."""
    followed: dict[int, Artifact]
    """By round up to there: the checkpoints that reward models of the new run have followed by then."""


def resolve(spec: ExperimentSpec, store: Store) -> Fork | None:
    """What `spec.fork` names; None where the run is no fork. Earlier runs of the same command are not meant: the same
    command again goes on from where they began.

    Raises ResourceError for a run that does not exist; SpecError for a step that it does not have or whose checkpoint
    is no longer in the store, for one that leaves nothing to do, and for another model.
    """
    if spec.fork is None:
        return None
    name, _, number = spec.fork.partition("@")
    run = named(spec, name)
    known = checkpoints(run)
    steps = sorted(known)
    if not steps:
        raise _problem(f"run {run.short} has trained nothing yet")
    step = steps[-1] if number == "" else int(number)
    if step not in known:
        raise _problem(
            f"run {run.short} has no checkpoint of step {step}; expected one of {', '.join(map(str, steps))}"
        )
    if step >= spec.rounds and spec.feedback is None:
        raise _problem(
            f"step {step} of run {run.short} leaves nothing to do with rounds={spec.rounds}, which counts from the "
            f"start of that run; give rounds={step + 1} or more, or feedback to learn from"
        )
    theirs, ours = run.spec.get("model", {}), spec.model.model_dump(mode="json")
    same = ["name", "source", "quantization", "lora"]
    if spec.model.lora is None or spec.model.quantization != "none":
        same.append("dtype")  # of what learns, or of what was rounded
    changed = [f"model.{key}={theirs.get(key)}" for key in same if theirs.get(key) != ours[key]]
    if changed:
        raise _problem(f"run {run.short} trained another model; take its values: {' '.join(changed)}")
    return Fork(
        run,
        step,
        _artifact(store, run, known[step], step),
        _artifact(store, run, known[0], 0) if 0 in known else None,
        {str(one): known[one] for one in steps if one <= step},
        [_data(store, run, known[one], one) for one in steps[::-1] if one > 0 and step - _replayed(spec) < one <= step],
        [_data(store, run, known[one], one) for one in steps[::-1] if step - _held(spec) < one <= step],
        {one: _followed(store, run, known, one) for one in _refreshed(spec) if one <= step},
    )


def named(spec: ExperimentSpec, name: str) -> RunRecord:
    """The run that is forked. Raises ResourceError where there is none."""
    ours = mask(spec.model_dump(mode="json", by_alias=True))

    def same_command(run: RunRecord) -> bool:
        return run.spec.get("fork") == spec.fork and placeless(run.spec) == placeless(ours)

    return Records(spec.root).get(name, ignore=same_command)


def _replayed(spec: ExperimentSpec) -> int:
    """How many rounds before its first one a run replays."""
    return spec.replay.rounds if spec.replay else 0


def _held(spec: ExperimentSpec) -> int:
    """How many rounds before its first one a run holds on to."""
    return spec.ewc.rounds if spec.ewc else 0


def _refreshed(spec: ExperimentSpec) -> list[int]:
    """Rounds after which reward models are trained further."""
    return spec.reward_model.refreshed(spec.rounds) if spec.reward_model else []


def _followed(store: Store, run: RunRecord, known: dict[int, str], step: int) -> Artifact:
    """A checkpoint between the start of the rounds and the step that is forked."""
    artifact = store.find(known[step]) if step in known else None
    if artifact is None:
        raise _problem(
            f"reward_model.every needs the checkpoint of step {step} of run {run.short}, which is no longer in "
            f"{store.root}: run it again, or set reward_model.every=0"
        )
    return artifact


def _data(store: Store, run: RunRecord, key: str, step: int) -> dict[str, Artifact]:
    """What the checkpoint of a step was trained on."""
    recorded = {one.key: one.request["inputs"] for one in run.stages}
    made_from, found = recorded[key] if key in recorded else _artifact(store, run, key, step).inputs, {}
    for name in filter(FED.fullmatch, made_from):
        artifact = store.find(made_from[name])
        if artifact is None:
            raise _problem(
                f"the {name} of round {step} of run {run.short} are no longer in {store.root}, and replay or ewc "
                "needs them: run it again, or set both to null"
            )
        found[name] = artifact
    return found


def _artifact(store: Store, run: RunRecord, key: str, step: int) -> Artifact:
    artifact = store.find(key)
    if artifact is None:
        raise _problem(f"the checkpoint of step {step} of run {run.short} is no longer in {store.root}: run it again")
    return artifact


def _problem(message: str) -> SpecError:
    return SpecError([Problem("fork", message)])
