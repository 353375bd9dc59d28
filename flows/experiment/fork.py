"""Forks: a run that starts from a step of another run, `fork=RUN@STEP`.

Its rounds start from the policy of that step; the warmup and the rounds up to STEP belong to the source run. Everything
else belongs to the new run: another algorithm, reward or learning rate continues from the same policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from components.artifacts import Artifact, Store
from components.deployment.card import placeless
from components.errors import Problem, SpecError
from components.redaction import mask
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Records, RunRecord, checkpoints
from flows.stages import STAGES


@dataclass(frozen=True)
class Fork:
    """Starting point of a forked run."""

    run: RunRecord
    """Source run."""
    step: int
    """Rounds that the policy was trained in."""
    checkpoint: Artifact
    reference: Artifact | None
    """Checkpoint at the start of the source run's rounds; None for the base model."""
    checkpoints: dict[str, str]
    """Keys of the starting checkpoint and of those before it, by step, for the record of the run."""
    earlier: list[dict[str, Artifact]]
    """Trajectories, scores and selection of the source run's last rounds up to `step`, latest first: as many as the new
    run replays."""
    anchored: list[dict[str, Artifact]]
    """The same including the source run's warmup: as many as elastic weight consolidation uses."""
    followed: dict[int, Artifact]
    """Checkpoints up to `step` after which the new run retrains its reward models, by round."""


def resolve(spec: ExperimentSpec, store: Store) -> Fork | None:
    """Return the starting point that `spec.fork` names; None if the run is no fork. Earlier runs of the same command do
    not count as the source run, so repeating a command resumes from the same starting point.

    Raises ResourceError for a run that does not exist. Raises SpecError for a step that the run does not have, a
    checkpoint that is no longer in the store, a step that leaves nothing to do, and a different model.
    """
    if spec.fork is None:
        return None
    name, _, number = spec.fork.partition("@")
    run = named(spec, name)
    keys = checkpoints(run)
    steps = sorted(keys)
    if not steps:
        raise _problem(f"run {run.short} has no checkpoint yet")
    step = steps[-1] if number == "" else int(number)
    if step not in keys:
        raise _problem(
            f"run {run.short} has no checkpoint of step {step}; expected one of {', '.join(map(str, steps))}"
        )
    if "rounds" in spec.flow.reads and step >= spec.rounds and spec.feedback is None:
        raise _problem(
            f"step {step} of run {run.short} leaves nothing to do with rounds={spec.rounds}, which counts from the "
            f"start of that run; expected rounds={step + 1} or more, or feedback to train on"
        )
    own = spec.resolve_dtypes(spec.model, "train").model_dump(mode="json")
    source = _trained_model(run)
    same = ["name", "source", "quantization", "lora"]
    if spec.model.lora is None or spec.model.quantization != "none":
        same.append("dtype")  # of the trained weights, or of the weights before quantization
    changed = [f"model.{key}={source.get(key)}" for key in same if source.get(key) != own[key]]
    if changed:
        raise _problem(f"run {run.short} trained another model; set its values: {' '.join(changed)}")
    replayed = [n for n in steps[::-1] if n > 0 and step - _replay_rounds(spec) < n <= step]
    anchored = [n for n in steps[::-1] if step - _ewc_rounds(spec) < n <= step]
    return Fork(
        run,
        step,
        _artifact(store, run, keys[step], step),
        _artifact(store, run, keys[0], 0) if 0 in keys else None,
        {str(n): keys[n] for n in steps if n <= step},
        [_data(store, run, keys[n], n) for n in replayed],
        [_data(store, run, keys[n], n) for n in anchored],
        {n: _retraining_checkpoint(store, run, keys, n) for n in _retraining_rounds(spec) if n <= step},
    )


def _trained_model(run: RunRecord) -> dict[str, Any]:
    """Return `model` of a run, with the dtype that it was trained in in place of `auto`."""
    model = run.spec.get("model", {})
    trained = [stage.request["spec"]["model"] for stage in run.stages if stage.request["stage"] == "train"]
    return {**model, "dtype": trained[-1]["dtype"]} if trained else model


def named(spec: ExperimentSpec, name: str) -> RunRecord:
    """Return the source run of a fork. Raises ResourceError if it does not exist."""
    own = mask(spec.model_dump(mode="json", by_alias=True))

    def same_command(run: RunRecord) -> bool:
        return run.spec.get("fork") == spec.fork and placeless(run.spec) == placeless(own)

    return Records(spec.root).get(name, ignore=same_command)


def _replay_rounds(spec: ExperimentSpec) -> int:
    """Return the number of rounds before the fork that the run replays."""
    return spec.replay.rounds if spec.replay else 0


def _ewc_rounds(spec: ExperimentSpec) -> int:
    """Return the number of rounds before the fork that elastic weight consolidation uses."""
    return spec.ewc.rounds if spec.ewc else 0


def _retraining_rounds(spec: ExperimentSpec) -> list[int]:
    """Return the rounds after which the reward models are retrained."""
    return spec.reward_model.refreshed(spec.rounds) if spec.reward_model else []


def _retraining_checkpoint(store: Store, run: RunRecord, keys: dict[int, str], step: int) -> Artifact:
    """Return the checkpoint of a step before the fork, which retraining of the reward models needs."""
    artifact = store.find(keys[step]) if step in keys else None
    if artifact is None:
        raise _problem(
            f"reward_model.every needs the checkpoint of step {step} of run {run.short}, which is no longer in "
            f"{store.root}: run it again, or set reward_model.every=0"
        )
    return artifact


def _data(store: Store, run: RunRecord, key: str, step: int) -> dict[str, Artifact]:
    """Return the artifacts that the checkpoint of a step was trained on, by input name."""
    recorded = {stage.key: stage.request["inputs"] for stage in run.stages}
    inputs, artifacts = recorded[key] if key in recorded else _artifact(store, run, key, step).inputs, {}
    for name in [name for name in inputs if STAGES["train"].rounds_ago(name) == 0]:
        artifact = store.find(inputs[name])
        if artifact is None:
            raise _problem(
                f"the {name} of round {step} of run {run.short} are no longer in {store.root}, and replay or ewc "
                "needs them: run it again, or set both to null"
            )
        artifacts[name] = artifact
    return artifacts


def _artifact(store: Store, run: RunRecord, key: str, step: int) -> Artifact:
    artifact = store.find(key)
    if artifact is None:
        raise _problem(f"the checkpoint of step {step} of run {run.short} is no longer in {store.root}: run it again")
    return artifact


def _problem(message: str) -> SpecError:
    return SpecError([Problem("fork", message)])
