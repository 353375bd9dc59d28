"""Library of the train stage: scored trajectories and a checkpoint in, a new checkpoint out.

The result is a function of the arguments. `warm` may cache the loaded model for the next call; the result is the same
with an empty cache.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.algorithms.spec import (
    AlgorithmSpec,
    DecaySpec,
    DistillSpec,
    GRPOSpec,
    OptimizerSpec,
    PolicyGradientSpec,
    PPOSpec,
    PreferenceSpec,
)
from components.compute.spec import Strategy
from components.errors import ResourceError
from components.models import trained_weights
from components.models.spec import ModelSpec
from components.trajectories.schema import Trajectory

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

    from components.algorithms.continual.ewc import Anchor
    from components.algorithms.loop.adamw import AdamW
    from components.algorithms.policy.policy import Policy
    from components.algorithms.ppo.critic import ValueCritic


def train(
    algorithm: AlgorithmSpec,
    model: ModelSpec,
    base_dir: Path,
    trajectories: Sequence[Trajectory],
    *,
    start: Path | None,
    reference: Path | None,
    out: Path,
    scratch: Path,
    seed: int,
    on_step: Callable[[dict[str, float]], None],
    warm: dict[str, Any] | None = None,
    save_every: float = 30.0,
    teacher_dir: Path | None = None,
    mean_costs: Mapping[str, float] | None = None,
    anchor: Anchor | None = None,
    strategy: Strategy = "ddp",
    rounds: tuple[int, int] = (1, 1),
) -> dict[str, float]:
    """Train from the checkpoint `start` (None: from the base model) and write the new checkpoint to the folder `out`.

    reference: checkpoint of the reference policy (None: the base model). on_step: called after each gradient step with
    its metrics, and at the start for the steps that an interrupted run with the same `scratch` took. save_every:
    seconds between two saves of the unfinished training to `scratch`. teacher_dir: local folder of the teacher's base
    model, for `algorithm=distill`. mean_costs: mean costs of all episodes of the round, by name, for `algorithm.costs`;
    None computes them from the trajectories. anchor: anchor of elastic weight consolidation.

    In distributed training (`distributed`) all processes get the same arguments, including folders; on_step is called
    in all of them, and the first one writes. strategy: tensors that are sharded over the processes.

    rounds: the number of this round, from 1, and the total; `algorithm.decay` extends over them.

    Returns the means of the metrics. Raises TrainingDiverged, without writing a checkpoint, and ArtifactError for
    trajectories that the algorithm cannot learn from.
    """
    import torch

    from components.algorithms import fit, foreign
    from components.algorithms.loop import checkpoint, distributed, schedule
    from components.algorithms.loop.guards import STRIKES, TrainingGuards
    from components.algorithms.loop.loss_scale import LossScale
    from components.algorithms.loop.resume import UnfinishedTraining
    from components.algorithms.policy import sharded
    from components.algorithms.policy_gradient import cost_constraints

    trajectories = foreign.convert_foreign_tokens(
        trajectories, base_dir, sampled=isinstance(algorithm, PolicyGradientSpec)
    )
    policy = _policy(base_dir, model, seed, start, warm)
    fit.check(trajectories, policy.model.get_input_embeddings().num_embeddings)
    trajectory_count = len(trajectories)
    if isinstance(algorithm, PolicyGradientSpec):
        trajectories = fit.drop_too_long(trajectories, model.max_length)
    if strategy != "ddp":
        if policy.adapter is None and (anchor is not None or isinstance(algorithm, PPOSpec)):
            raise ResourceError(
                f"strategy {strategy}: {'ewc' if anchor is not None else algorithm.name} with model.lora=null cannot "
                "be sharded; expected strategy ddp, or model.lora with a rank"
            )
        sharded.shard(policy, strategy)
    policy.checkpoint_layers(algorithm.gradient_checkpointing)
    policy.use_reference(policy.folder(reference) if reference else None)
    critic = _critic(policy, algorithm)
    modules: list[Policy | ValueCritic] = [policy, *([critic] if critic else [])]
    names = [name for module in modules for name in module.parameters]
    policy.penalty = None
    if anchor is not None:
        from components.algorithms.continual import ewc

        policy.penalty = ewc.penalty(policy, anchor, base_dir, pack_tokens=algorithm.pack_tokens, seed=seed)
    teacher = None
    if isinstance(algorithm, DistillSpec):  # before the seed is set, because a new adapter draws random numbers
        from components.algorithms.distillation.teacher import load_teacher

        assert teacher_dir is not None, "algorithm=distill requires teacher_dir"
        teacher = load_teacher(policy, base_dir, algorithm.teacher, teacher_dir, warm)
    optimizer = _adamw(algorithm, [list(module.parameters.values()) for module in modules])
    optimizer.register_step_post_hook(lambda *_: policy.reshard())
    optimizer.zero_grad(set_to_none=True)  # a warm policy may have gradients of an interrupted call
    torch.manual_seed(seed)
    policy.loss_scale = LossScale.of(model.dtype)  # a warm policy has the loss scale of the previous training
    state: dict[str, Any] = {"optimizer": optimizer, "names": names, "loss_scale": policy.loss_scale}
    step = 0
    if start is not None:
        step = checkpoint.load_state(start, algorithm=algorithm.name, **state)
        if critic is not None and (start / checkpoint.CRITIC).is_dir():
            critic.load(start / checkpoint.CRITIC)
    unfinished = UnfinishedTraining(
        scratch / "unfinished", policy, optimizer, critic, algorithm=algorithm.name, start=step, every=save_every
    )
    unfinished.restore()
    for step_metrics in unfinished.steps:
        on_step(step_metrics)

    def record_step(metrics: dict[str, float]) -> None:
        unfinished.record_step(metrics)
        on_step(metrics)

    options: dict[str, Any] = {
        "step": step,
        "seed": seed,
        "scratch": scratch,
        "earlier_steps": tuple(unfinished.steps),
        "on_step": record_step,
    }
    if isinstance(algorithm, DecaySpec):
        options["rounds"] = schedule.Rounds(*rounds)
    multipliers: cost_constraints.Multipliers = {}
    extra_metrics: dict[str, float] = (
        {"too_long": float(trajectory_count - len(trajectories))} if len(trajectories) < trajectory_count else {}
    )
    if isinstance(algorithm, PolicyGradientSpec) and (algorithm.costs or algorithm.reward_cap is not None):
        trajectories, multipliers, cost_metrics = cost_constraints.apply_constraints(
            algorithm, trajectories, start, mean_costs
        )
        extra_metrics |= cost_metrics
    with unfinished.save_on_interrupt(), _released(policy):
        if isinstance(algorithm, GRPOSpec):
            from components.algorithms.policy_gradient.trainer import train_policy_gradient

            step, metrics = train_policy_gradient(algorithm, policy, optimizer, trajectories, **options)
        elif isinstance(algorithm, PPOSpec):
            from components.algorithms.ppo.trainer import train_ppo

            assert critic is not None
            step, metrics = train_ppo(algorithm, policy, critic, optimizer, trajectories, **options)
        elif isinstance(algorithm, PreferenceSpec):
            from components.algorithms.preference.trainer import train_preference

            step, metrics = train_preference(algorithm, policy, optimizer, base_dir, trajectories, **options)
        elif isinstance(algorithm, DistillSpec):
            from components.algorithms.distillation.trainer import train_distill

            assert teacher is not None
            step, metrics = train_distill(
                algorithm, policy, optimizer, base_dir, trajectories, teacher=teacher, **options
            )
        else:
            from components.algorithms.sft.trainer import train_sft

            step, metrics = train_sft(algorithm, policy, optimizer, base_dir, trajectories, **options)
    if not unfinished.steps:
        log.warning("nothing to learn from: the new checkpoint equals the one that training started from")
    broken_names = [name for module in modules for name in sharded.non_finite_names(module.parameters)]
    if broken_names:
        measured = {"not_finite": float(len(broken_names))}
        TrainingGuards(scratch).stop(
            {"step": step, **measured, "trajectories": [trajectory.id for trajectory in trajectories]},
            measured,
            trajectories,
            f"not_finite counts trained tensors with infinite or NaN values, such as {broken_names[0]}. Lower "
            "algorithm.learning_rate",
        )
    gathered, moments = policy.gather(), checkpoint.moments(optimizer, names)
    if distributed.first():
        (out / "log.jsonl").write_text("".join(json.dumps(step_metrics) + "\n" for step_metrics in unfinished.steps))
        if strikes := TrainingGuards(scratch).strikes():
            (out / STRIKES).write_text("".join(json.dumps(strike) + "\n" for strike in strikes))
        policy.save(policy.folder(out), gathered)
        if critic is not None:
            critic.save(out / checkpoint.CRITIC)
        scale = policy.loss_scale.state()
        checkpoint.save_state(out, algorithm=algorithm.name, step=step, moments=moments, loss_scale=scale)
        cost_constraints.save(out, multipliers)
    distributed.wait()
    return metrics | extra_metrics


@contextlib.contextmanager
def _released(policy: Policy) -> Iterator[None]:
    """Free the memory that a warm policy does not need between trainings, on exit."""
    try:
        yield
    finally:
        policy.release()


def policy_digest(checkpoint_dir: Path) -> str:
    """Return the sha256 over the trained tensors of a checkpoint."""
    return trained_weights.digest(trained_weights.folder_of(checkpoint_dir))


def _policy(base_dir: Path, model: ModelSpec, seed: int, start: Path | None, warm: dict[str, Any] | None) -> Policy:
    """Return the model in training with the weights of `start`, or the base model if that is None."""
    from components.algorithms.policy.policy import Policy

    key = f"policy {base_dir} {model.content()} {model.model_dump_json()}"
    policy: Policy | None = warm.pop(key, None) if warm is not None else None
    if policy is None or start is None:
        policy = None  # free the old policy before the new one is loaded
        policy = Policy(base_dir, model, seed)
    if warm is not None:
        warm[key] = policy
    if start is not None:
        policy.load(policy.folder(start))
    return policy


def _critic(policy: Policy, algorithm: AlgorithmSpec) -> ValueCritic | None:
    """Return a new critic if the algorithm has one, else None."""
    if not isinstance(algorithm, PPOSpec):
        return None
    from components.algorithms.ppo.critic import ValueCritic

    return ValueCritic(policy, algorithm)


def _adamw(spec: OptimizerSpec, groups: list[list[torch.nn.Parameter]]) -> AdamW:
    from components.algorithms.loop.adamw import AdamW

    return AdamW(
        [{"params": group} for group in groups],
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
    )
