"""Train stage: trains a checkpoint on scored and selected trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.algorithms.choices import AnyAlgorithmSpec
from components.algorithms.continual.spec import EWCSpec, ReplaySpec
from components.artifacts import Draft
from components.compute.spec import SaveEvery
from components.errors import Problem, SpecError
from components.inference.protocol import BASE_POLICY
from components.models.spec import ModelSpec
from components.tracking.stages import StageTracking
from components.trajectories.schema import Trajectory
from flows.stages.base import Context, Inputs, Stage, StageSpec, TrainingProgress

if TYPE_CHECKING:
    from components.algorithms.trainer import PolicyTrainingRequest
    from components.trajectories.selected import SelectedTrajectories

CHECKPOINT_VERSION = 1
"""Version of the layout: adapter/, optimizer.safetensors, trainer.json, log.jsonl; critic/ with PPO; multipliers.json
with costs."""


class TrainStage(StageSpec):
    model: ModelSpec
    algorithm: AnyAlgorithmSpec
    save_every: SaveEvery = "auto"
    """Seconds between two saves of the unfinished training (`compute.save_every`)."""
    replay: ReplaySpec | None = None
    ewc: EWCSpec | None = None
    roles: list[str] | None = None
    """Roles whose histories are trained; None: all."""
    rounds: tuple[int, int] = (1, 1)
    """Number of the round, from 1, and the total number of rounds, over which `algorithm.decay` lowers the learning
    rate."""

    def key_part(self) -> dict[str, Any]:
        part: dict[str, Any] = {
            "model": self.model.key_part(),
            "algorithm": self.algorithm.key_part(),
        }
        if self.replay is not None:
            part["replay"] = self.replay.model_dump(mode="json", exclude={"rounds"})  # those are inputs
        if self.ewc is not None:
            part["ewc"] = self.ewc.model_dump(mode="json", exclude={"rounds"})
        if self.roles is not None:
            part["roles"] = sorted(self.roles)
        if self.algorithm.decays:
            part["rounds"] = list(self.rounds)
        return part


def train(spec: TrainStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write a checkpoint.

    Inputs: `trajectories`, `scores`, `selection`, those of refills `trajectories+K` and so on; `start`, the checkpoint
    to train further; `reference`, the checkpoint of the KL divergence (without: the base model); `trajectories-N`,
    `scores-N`, `selection-N`, those of N rounds ago; `anchor`, the checkpoint of elastic weight consolidation, and its
    training data, `anchored-trajectories-N` and so on, N counted from the start of the rounds."""
    from components.algorithms.train import train as run

    request, figures = training_request(spec, inputs, draft.path, context)
    return run(spec.algorithm, request) | figures


def training_request(
    spec: TrainStage, inputs: Inputs, out: Path, context: Context
) -> tuple[PolicyTrainingRequest, dict[str, float]]:
    """Return the training of the stage, and metrics of its trajectories. out: folder of the checkpoint."""
    from components.algorithms.continual.replay import mixed
    from components.algorithms.policy_gradient.cost_constraints import mean_costs
    from components.algorithms.train import policy_digest
    from components.algorithms.trainer import PolicyTrainingRequest, Rounds
    from components.models.weights import prepare
    from components.trajectories.streamed import heads
    from components.trajectories.versions import VERSIONS, off_policy_tokens

    algorithm, costs = spec.algorithm, spec.algorithm.constraints
    scored = _scored(inputs, components=bool(costs))
    trajectories: Sequence[Trajectory] = scored
    version = policy_digest(inputs["start"].path) if "start" in inputs else BASE_POLICY
    figures: dict[str, float] = {}
    if spec.replay is not None:
        trajectories, figures = mixed(
            spec.replay,
            trajectories,
            [_scored(inputs, f"-{ago}", components=bool(costs)) for ago in _rounds(inputs)],
            version=version,
            compared=algorithm.needs_reward_spread,
            seed=context.seed,
        )
    if spec.roles is not None:
        trajectories = _restricted(trajectories, spec.roles)
    if algorithm.needs_sampled_tokens:
        samplers = [(head.policy, VERSIONS in head.sampling) for head in heads(trajectories)]
        if off_policy := sum(policy != version for policy, _ in samplers):
            figures["off_policy"] = off_policy / len(samplers)  # share of episodes sampled from another policy
            if any(several for _, several in samplers):
                figures["off_policy_tokens"] = off_policy_tokens(trajectories, version)
    teacher_dir = None
    if algorithm.teacher_model is not None:
        teacher_dir = prepare(algorithm.teacher_model.model(spec.model.max_length), context.cache)
    anchor = None
    if spec.ewc is not None:
        from components.algorithms.trainer import Anchor

        anchored = [trajectory for ago in _rounds(inputs, "anchored-") for trajectory in _renamed(inputs, ago)]
        anchor = Anchor(spec.ewc, inputs["anchor"].path, anchored)
    assert context.scratch is not None
    progress = TrainingProgress(context.progress)
    request = PolicyTrainingRequest(
        model=spec.model,
        base_dir=prepare(spec.model, context.cache),
        trajectories=trajectories,
        start=inputs["start"].path if "start" in inputs else None,
        reference=inputs["reference"].path if "reference" in inputs else None,
        out=out,
        scratch=context.scratch,
        seed=context.seed,
        on_step=progress.on_step,
        on_total=progress.on_total,
        warm=context.warm.trainer,
        save_every=spec.save_every,
        teacher_dir=teacher_dir,
        mean_costs=mean_costs(costs, _scored(inputs, components=True, selected=False)) if costs else None,
        anchor=anchor,
        strategy=context.strategy,
        rounds=Rounds(*spec.rounds),
    )
    return request, figures


def _restricted(trajectories: Sequence[Trajectory], roles: list[str]) -> Sequence[Trajectory]:
    """Return the trajectories with the histories of these roles, without trajectories that have none. Raises SpecError
    if no trajectory has a history of one of the roles."""
    from components.trajectories.roles import restrict, role_names
    from components.trajectories.streamed import Pick, PickedTrajectories, heads

    present = [role_names(head) for head in heads(trajectories)]
    names = {role for roles in present for role in roles}
    if present and (missing := [role for role in roles if role not in names]):
        text = f"{missing[0]}: no episode has a history of this role; there are {', '.join(sorted(names))}"
        raise SpecError([Problem("flow.order", text)])
    places = [place for place, roles_present in enumerate(present) if not {*roles}.isdisjoint(roles_present)]
    return PickedTrajectories([Pick(trajectories, places, partial(restrict, roles=roles))])


def _rounds(inputs: Inputs, prefix: str = "") -> list[int]:
    """Return the distances of the earlier rounds among the inputs, in rounds. prefix: `anchored-`, or none."""
    names = [name for name in inputs if name.startswith(f"{prefix}trajectories")]
    return sorted({ago for name in names if (ago := STAGE.rounds_ago(name))})


def _renamed(inputs: Inputs, ago: int) -> list[Trajectory]:
    """Return the anchor's training data of `ago` rounds ago, with unique ids: rounds may share scenarios."""
    trajectories = _scored(inputs, f"-{ago}", prefix="anchored-")
    return [replace(trajectory, id=f"{trajectory.id}@-{ago}") for trajectory in trajectories]


def _scored(
    inputs: Inputs, ago: str = "", *, components: bool = False, selected: bool = True, prefix: str = ""
) -> SelectedTrajectories:
    """Return the scored trajectories of a round, with those of its refills.

    ago: suffix of the input names of an earlier round. components: add the components of the scores to the metrics.
    selected: only the selected trajectories. prefix: of the input names, `anchored-` or none."""
    from components.trajectories.selected import SelectedFiles, SelectedTrajectories

    collections = []
    for refill in ["", *(f"+{number}" for number in range(1, len(inputs)))]:
        if f"{prefix}trajectories{refill}{ago}" not in inputs:
            break
        trajectories, scores, selection = (
            inputs[f"{prefix}{name}{refill}{ago}"].path / f"{name}.parquet"
            for name in ("trajectories", "scores", "selection")
        )
        collections.append(SelectedFiles(trajectories, scores, selection if selected else None))
    return SelectedTrajectories(collections, components=components)


CHECKPOINT_FILES = {
    "adapter/": "LoRA adapter",
    "adapters/": "in its place, a LoRA adapter for each role (`model.lora.roles`)",
    "weights/": "in its place, all weights (`model.lora=null`)",
    "optimizer.safetensors": "AdamW's moments",
    "rng.safetensors": "random state",
    "trainer.json": "algorithm, number of gradient steps",
    "log.jsonl": "metrics of each gradient step",
    "guards.jsonl": "gradient steps at which a guard warned or skipped",
}
"""Files of trained models."""
OPTIONAL_FILES = ("adapter/", "adapters/", "weights/", "guards.jsonl")
"""Files that only some trained models have."""

STAGE = Stage(
    "train",
    9,
    TrainStage,
    "checkpoint",
    CHECKPOINT_VERSION,
    train,
    files={
        **CHECKPOINT_FILES,
        "critic/": "value model of PPO",
        "multipliers.json": "Lagrange multipliers of costs",
    },
    optional=(*OPTIONAL_FILES, "critic/", "multipliers.json"),
    volatile=("log.jsonl",),
    inputs={
        "[anchored-]trajectories[+K][-N]": "trajectories or feedback or dataset",
        "[anchored-]scores[+K][-N]": "scores or feedback or dataset",
        "[anchored-]selection[+K][-N]": "selection or feedback or dataset",
        "start": "checkpoint",
        "reference": "checkpoint",
        "anchor": "checkpoint",
    },
    order=50,
    unit="steps",
    distributed=True,
    tracking=StageTracking(model=True),
    part_of_round=True,
    round_metrics={"*": "*"},
    lineage="step",
)
