"""The train stage's library: scored trajectories and a checkpoint in, a new checkpoint out.

Nothing but the arguments decides the result. `warm` may keep the loaded model for the next call; with an empty one
the result is the same.
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
    from components.algorithms.ppo.critic import Critic


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
    """Trains from the checkpoint `start` (None: from the base model) and writes the new one to the folder `out`.

    reference: checkpoint for the KL (None: the base model). on_step is called after each gradient step with its
    metrics, at once for those that an earlier try with the same `scratch` had taken. save_every: seconds between two
    saves of the unfinished training to `scratch`. teacher_dir: local folder of the teacher's base model, for
    `algorithm=distill`. mean_costs: of all episodes of the round, by name, for `algorithm.costs`; None takes those of
    the trajectories. anchor: what elastic weight consolidation holds on to.

    In several processes (`distributed`) each is given the same arguments, folders too; on_step is called in all of
    them, and the first one writes. strategy: what lies in parts on them.

    rounds: the number of this round, from 1, and of all; `algorithm.decay` falls over them.

    Returns the means of the metrics. Raises TrainingDiverged, and then writes no checkpoint, and ArtifactError for
    trajectories that the algorithm cannot learn from.
    """
    import torch

    from components.algorithms import fit, foreign
    from components.algorithms.loop import checkpoint, distributed, schedule
    from components.algorithms.loop.guards import STRIKES, Guards
    from components.algorithms.loop.loss_scale import LossScale
    from components.algorithms.loop.resume import Unfinished
    from components.algorithms.policy import sharded
    from components.algorithms.policy_gradient import cost_constraints

    trajectories = foreign.in_own_tokens(trajectories, base_dir, sampled=isinstance(algorithm, PolicyGradientSpec))
    policy = _policy(base_dir, model, seed, start, warm)
    fit.check(trajectories, policy.model.get_input_embeddings().num_embeddings)
    given = len(trajectories)
    if isinstance(algorithm, PolicyGradientSpec):
        trajectories = fit.short_enough(trajectories, model.max_length)
    if strategy != "ddp":
        if policy.adapter is None and (anchor is not None or isinstance(algorithm, PPOSpec)):
            raise ResourceError(
                f"strategy {strategy}: {'ewc' if anchor is not None else algorithm.name} with model.lora=null is not "
                "distributed in parts; expected strategy ddp, or model.lora with a rank"
            )
        sharded.shard(policy, strategy)
    policy.checkpoint_layers(algorithm.gradient_checkpointing)
    policy.use_reference(policy.folder(reference) if reference else None)
    critic = _critic(policy, algorithm)
    learning: list[Policy | Critic] = [policy, *([critic] if critic else [])]
    names = [name for one in learning for name in one.parameters]
    policy.penalty = None
    if anchor is not None:
        from components.algorithms.continual import ewc

        policy.penalty = ewc.penalty(policy, anchor, base_dir, pack_tokens=algorithm.pack_tokens, seed=seed)
    teacher = None
    if isinstance(algorithm, DistillSpec):  # before the seed is set: a new adapter draws random numbers
        from components.algorithms.distillation.teacher import teacher_of

        assert teacher_dir is not None, "a teacher to learn from"
        teacher = teacher_of(policy, base_dir, algorithm.teacher, teacher_dir, warm)
    optimizer = _adamw(algorithm, [list(one.parameters.values()) for one in learning])
    optimizer.register_step_post_hook(lambda *_: policy.settle())
    optimizer.zero_grad(set_to_none=True)  # a warm policy may hold those of a call that was interrupted
    torch.manual_seed(seed)
    policy.loss_scale = LossScale.of(model.dtype)  # a warm policy has that of the training before
    state: dict[str, Any] = {"optimizer": optimizer, "names": names, "loss_scale": policy.loss_scale}
    step = 0
    if start is not None:
        step = checkpoint.load_state(start, algorithm=algorithm.name, **state)
        if critic is not None and (start / checkpoint.CRITIC).is_dir():
            critic.load(start / checkpoint.CRITIC)
    unfinished = Unfinished(
        scratch / "unfinished", policy, optimizer, critic, algorithm=algorithm.name, start=step, every=save_every
    )
    unfinished.restore()
    for taken in unfinished.steps:
        on_step(taken)

    def took(metrics: dict[str, float]) -> None:
        unfinished.took(metrics)
        on_step(metrics)

    rest: dict[str, Any] = {
        "step": step,
        "seed": seed,
        "scratch": scratch,
        "taken": tuple(unfinished.steps),
        "on_step": took,
    }
    if isinstance(algorithm, DecaySpec):
        rest["rounds"] = schedule.Rounds(*rounds)
    multipliers: cost_constraints.Multipliers = {}
    figures: dict[str, float] = {"too_long": float(given - len(trajectories))} if len(trajectories) < given else {}
    if isinstance(algorithm, PolicyGradientSpec) and (algorithm.costs or algorithm.reward_cap is not None):
        trajectories, multipliers, constrained = cost_constraints.constrained(
            algorithm, trajectories, start, mean_costs
        )
        figures |= constrained
    with unfinished.saved_when_stopped(), _released(policy):
        if isinstance(algorithm, GRPOSpec):
            from components.algorithms.policy_gradient.trainer import train_policy_gradient

            step, metrics = train_policy_gradient(algorithm, policy, optimizer, trajectories, **rest)
        elif isinstance(algorithm, PPOSpec):
            from components.algorithms.ppo.trainer import train_ppo

            assert critic is not None
            step, metrics = train_ppo(algorithm, policy, critic, optimizer, trajectories, **rest)
        elif isinstance(algorithm, PreferenceSpec):
            from components.algorithms.preference.trainer import train_preference

            step, metrics = train_preference(algorithm, policy, optimizer, base_dir, trajectories, **rest)
        elif isinstance(algorithm, DistillSpec):
            from components.algorithms.distillation.trainer import train_distill

            assert teacher is not None
            step, metrics = train_distill(algorithm, policy, optimizer, base_dir, trajectories, teacher=teacher, **rest)
        else:
            from components.algorithms.sft.trainer import train_sft

            step, metrics = train_sft(algorithm, policy, optimizer, base_dir, trajectories, **rest)
    if not unfinished.steps:
        log.warning("there was nothing to learn from: the new checkpoint is the one that training began with")
    broken = [name for one in learning for name in sharded.not_finite(one.parameters)]
    if broken:
        measured = {"not_finite": float(len(broken))}
        Guards(scratch).stop(
            {"step": step, **measured, "trajectories": [trajectory.id for trajectory in trajectories]},
            measured,
            trajectories,
            f"not_finite counts tensors of what learns, {broken[0]} first. Lower algorithm.learning_rate",
        )
    learned, moments = policy.gather(), checkpoint.moments(optimizer, names)
    if distributed.first():
        (out / "log.jsonl").write_text("".join(json.dumps(taken) + "\n" for taken in unfinished.steps))
        if strikes := Guards(scratch).strikes():
            (out / STRIKES).write_text("".join(json.dumps(one) + "\n" for one in strikes))
        policy.save(policy.folder(out), learned)
        if critic is not None:
            critic.save(out / checkpoint.CRITIC)
        scale = policy.loss_scale.state()
        checkpoint.save_state(out, algorithm=algorithm.name, step=step, moments=moments, loss_scale=scale)
        cost_constraints.save(out, multipliers)
    distributed.wait()
    return metrics | figures


@contextlib.contextmanager
def _released(policy: Policy) -> Iterator[None]:
    """Afterwards a warm policy holds nothing more than it needs."""
    try:
        yield
    finally:
        policy.release()


def policy_digest(checkpoint_dir: Path) -> str:
    """sha256 over the tensors that a checkpoint has learned."""
    return trained_weights.digest(trained_weights.folder_of(checkpoint_dir))


def _policy(base_dir: Path, model: ModelSpec, seed: int, start: Path | None, warm: dict[str, Any] | None) -> Policy:
    """The model in training, holding what `start` had learned; the base model where that is None."""
    from components.algorithms.policy.policy import Policy

    key = f"policy {base_dir} {model.content()} {model.model_dump_json()}"
    policy: Policy | None = warm.pop(key, None) if warm is not None else None
    if policy is None or start is None:
        policy = None  # frees the old one before the new one is loaded
        policy = Policy(base_dir, model, seed)
    if warm is not None:
        warm[key] = policy
    if start is not None:
        policy.load(policy.folder(start))
    return policy


def _critic(policy: Policy, algorithm: AlgorithmSpec) -> Critic | None:
    """A fresh one, for the algorithm that has one."""
    if not isinstance(algorithm, PPOSpec):
        return None
    from components.algorithms.ppo.critic import Critic

    return Critic(policy, algorithm)


def _adamw(spec: OptimizerSpec, groups: list[list[torch.nn.Parameter]]) -> AdamW:
    from components.algorithms.loop.adamw import AdamW

    return AdamW(
        [{"params": group} for group in groups],
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        weight_decay=spec.weight_decay,
    )
