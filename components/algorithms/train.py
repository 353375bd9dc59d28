"""Library of the train stage: scored trajectories and a checkpoint in, a new checkpoint out.

The result is a function of the arguments. `warm` may cache the loaded model for the next call; the result is the same
with an empty cache. Trajectories are validated first: token ids within the vocabulary, length within the model's limit,
finite rewards.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.algorithms.spec import AlgorithmSpec
from components.algorithms.trainer import PolicyTrainingRequest, TrainedModule, TrainingContext
from components.errors import ArtifactError, ResourceError
from components.models import trained_weights
from components.trajectories.schema import Trajectory
from components.trajectories.streamed import StreamedTrajectories

if TYPE_CHECKING:
    from components.algorithms.policy.policy import Policy
    from components.algorithms.trainer import GroupGradients

logger = logging.getLogger(__name__)


def train(algorithm: AlgorithmSpec, request: PolicyTrainingRequest) -> dict[str, float]:
    """Train a policy and write the new checkpoint to the folder `request.out`.

    Returns the means of the metrics. Raises TrainingDiverged, without writing a checkpoint, and ArtifactError for
    trajectories that the algorithm cannot learn from.
    """
    import torch

    from components.algorithms.loop import checkpoint, distributed
    from components.algorithms.loop.adamw import adamw
    from components.algorithms.loop.guards import TrainingGuards
    from components.algorithms.loop.loss_scale import LossScale
    from components.algorithms.loop.resume import UnfinishedTraining
    from components.algorithms.policy import pack_size

    _refuse_unsharded(algorithm, request)
    policy, trajectories, too_long = _policy_and_trajectories(algorithm, request)
    critic = _prepared_critic(algorithm, policy, request)
    algorithm = pack_size.resolve(algorithm, policy, request)
    modules: list[TrainedModule] = [policy, *([critic] if critic else [])]
    names = [name for module in modules for name in module.parameters]
    optimizer = adamw(algorithm, [list(module.parameters.values()) for module in modules])
    optimizer.parameters_are_masters = policy.is_sharded and request.model.dtype != "float32"
    optimizer.register_step_post_hook(lambda *_: policy.reshard())
    optimizer.zero_grad(set_to_none=True)  # a warm policy may have gradients of an interrupted call
    torch.manual_seed(request.seed)
    policy.loss_scale = LossScale.of(request.model.dtype)  # a warm policy has the loss scale of the previous training
    step = 0
    if (start := request.start) is not None:
        step = checkpoint.load_state(
            start, algorithm=algorithm.name, optimizer=optimizer, names=names, loss_scale=policy.loss_scale
        )
        if critic is not None and (start / checkpoint.CRITIC).is_dir():
            critic.load(start / checkpoint.CRITIC)
    unfinished = UnfinishedTraining(request.scratch / "unfinished", policy, optimizer, critic, every=request.save_every)
    context = TrainingContext.of(
        request,
        policy=policy,
        optimizer=optimizer,
        trajectories=trajectories,
        on_step=unfinished.resume(request.on_step),
        step=step,
        earlier_steps=tuple(unfinished.steps),
        critic=critic,
    )
    with unfinished.save_on_interrupt(), _released(policy):
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):  # further models that the trainer loads draw random numbers
            trainer = algorithm.build(context)
        step, metrics = trainer.train()
    if not unfinished.steps:
        logger.warning("nothing to learn from: the new checkpoint equals the one that training started from")
    _require_finite(modules, context, step)
    first = distributed.first()
    if first or policy.is_sharded:
        policy.save(policy.folder(request.out))
        state: dict[str, Any] = {"optimizer": optimizer, "names": names, "loss_scale": policy.loss_scale.state()}
        checkpoint.save_state(request.out, algorithm=algorithm.name, step=step, first=first, **state)
    if first:
        unfinished.write_log(request.out, TrainingGuards(request.scratch))
        policy.check_saved(policy.folder(request.out))
        if critic is not None:
            critic.save(request.out / checkpoint.CRITIC)
        trainer.save(request.out)
    distributed.wait()
    chosen = {"pack_tokens": float(algorithm.pack_size)} if policy.device.startswith("cuda") else {}
    return metrics | chosen | ({"too_long": float(too_long)} if too_long else {})


@contextlib.contextmanager
def group_gradients(algorithm: AlgorithmSpec, request: PolicyTrainingRequest) -> Iterator[GroupGradients]:
    """Provide the gradients of the groups of a training, at the policy that it starts from. Nothing is trained; `out`
    is not used. `algorithm.has_group_gradients` must be True.

    Raises ArtifactError for trajectories that the algorithm cannot learn from."""
    import torch

    from components.algorithms.loop.loss_scale import LossScale

    policy, trajectories, _ = _policy_and_trajectories(algorithm, request)
    policy.checkpoint_layers(algorithm.gradient_checkpointing)
    policy.use_reference(policy.folder(request.reference) if request.reference else None)
    policy.loss_scale = LossScale.of(request.model.dtype)
    optimizer = torch.optim.SGD(policy.parameters.values())
    context = TrainingContext.of(request, policy=policy, optimizer=optimizer, trajectories=trajectories)
    with _released(policy):
        yield algorithm.group_gradients(context)


def policy_digest(checkpoint_dir: Path) -> str:
    """Return the sha256 over the trained tensors of a checkpoint."""
    return trained_weights.digest(trained_weights.folder_of(checkpoint_dir))


def _policy_and_trajectories(
    algorithm: AlgorithmSpec, request: PolicyTrainingRequest
) -> tuple[Policy, Sequence[Trajectory], int]:
    """Return the policy at the start of a training, the trajectories that it learns from, and the number of those left
    out because they are too long."""
    from components.algorithms import foreign
    from components.algorithms.loop.mapped_episodes import mapped

    sampled = algorithm.needs_sampled_tokens
    if isinstance(request.trajectories, StreamedTrajectories):
        policy = _policy(request)
        prepare = _prepare(request.base_dir, _vocabulary(policy), sampled=sampled)
        if not sampled:
            return policy, request.trajectories.map(prepare), 0
        own_tokens: Sequence[Trajectory] = mapped(request.scratch, request.trajectories, prepare)
    else:
        own_tokens = foreign.convert_foreign_tokens(request.trajectories, request.base_dir, sampled=sampled)
        policy = _policy(request)
        for trajectory in own_tokens:
            _check(trajectory, _vocabulary(policy))
        if not sampled:
            return policy, own_tokens, 0
    trajectories = _drop_too_long(own_tokens, request.model.max_length)
    return policy, trajectories, len(own_tokens) - len(trajectories)


def _policy(request: PolicyTrainingRequest) -> Policy:
    """Return the model in training with the weights of `start`, or the base model if that is None."""
    from components.algorithms.policy.policy import Policy

    model, start, warm = request.model, request.start, request.warm
    key = f"policy {request.base_dir} {model.content()} {model.model_dump_json()}"
    policy: Policy | None = warm.pop(key, None) if warm is not None else None
    if policy is None or start is None:
        policy = None  # free the old policy before the new one is loaded
        policy = Policy(request.base_dir, model, request.seed, request.strategy)
    if warm is not None:
        warm[key] = policy
    if start is not None:
        policy.load(policy.folder(start))
    return policy


def _refuse_unsharded(algorithm: AlgorithmSpec, request: PolicyTrainingRequest) -> None:
    """Raise ResourceError for parts of a training of all weights that cannot be sharded."""
    anchor, strategy = request.anchor, request.strategy
    if strategy != "ddp" and request.model.lora is None and (anchor is not None or algorithm.has_critic):
        raise ResourceError(
            f"strategy {strategy}: {'ewc' if anchor is not None else algorithm.name} with model.lora=null cannot "
            "be sharded; expected strategy ddp, or model.lora with a rank"
        )


def _prepared_critic(algorithm: AlgorithmSpec, policy: Policy, request: PolicyTrainingRequest) -> TrainedModule | None:
    """Set the policy's reference and its penalty, and return a new critic if the algorithm has one."""
    anchor = request.anchor
    policy.checkpoint_layers(algorithm.gradient_checkpointing)
    policy.use_reference(policy.folder(request.reference) if request.reference else None)
    critic = algorithm.critic(policy)
    policy.penalty = None
    if anchor is not None:
        from components.algorithms.continual import ewc

        policy.penalty = ewc.penalty(
            policy, anchor, request.base_dir, pack_tokens=algorithm.pack_size, seed=request.seed
        )
    return critic


def _require_finite(modules: Sequence[TrainedModule], context: TrainingContext, step: int) -> None:
    """Raise TrainingDiverged if a trained tensor has infinite or NaN values."""
    from components.algorithms.loop.guards import TrainingGuards
    from components.algorithms.policy import sharded

    broken_names = [name for module in modules for name in sharded.non_finite_names(module.parameters)]
    if broken_names:
        measured = {"not_finite": float(len(broken_names))}
        TrainingGuards(context.scratch).stop(
            {"step": step, **measured, "trajectories": [trajectory.id for trajectory in context.trajectories]},
            measured,
            context.trajectories,
            f"not_finite counts trained tensors with infinite or NaN values, such as {broken_names[0]}. Lower "
            "algorithm.learning_rate",
        )


@contextlib.contextmanager
def _released(policy: Policy) -> Iterator[None]:
    """Free the memory that a warm policy does not need between trainings, on exit."""
    try:
        yield
    finally:
        policy.release()


MAX_LISTED = 5
"""Largest number of trajectories that a warning lists."""


def _vocabulary(policy: Policy) -> int:
    return policy.model.get_input_embeddings().num_embeddings


def _prepare(base_dir: Path, vocabulary: int, *, sampled: bool) -> Callable[[Trajectory], Trajectory]:
    """Return a function that converts an episode in files to the policy's own tokens, and checks it. An episode that is
    left out has no histories and no reward. sampled: as for `foreign.OwnTokens`."""
    from components.algorithms import foreign

    own_tokens = foreign.OwnTokens(base_dir, sampled=sampled)

    def prepare(trajectory: Trajectory) -> Trajectory:
        own = own_tokens(trajectory)
        if own is None:
            logger.warning("%s is left out of training: another model's answer was truncated", trajectory.id)
            return replace(trajectory, histories=[], reward=None)
        _check(own, vocabulary)
        return own

    return prepare


def _check(trajectory: Trajectory, vocabulary: int) -> None:
    """Raise ArtifactError for a token id outside the vocabulary, and for a reward that is not finite."""
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise ArtifactError(
            f"trajectory {trajectory.id} has the reward {trajectory.reward}: expected a finite number, or none if "
            "it could not be scored"
        )
    for history in trajectory.histories:
        unknown_id = next((token for token in history.token_ids if not 0 <= token < vocabulary), None)
        if unknown_id is not None:
            raise ArtifactError(
                f"trajectory {trajectory.id} has the token id {unknown_id}, but the model's ids range from 0 to "
                f"{vocabulary - 1}: it was sampled from another model. Collect with the model in training"
            )


def _drop_too_long(trajectories: Sequence[Trajectory], max_length: int) -> list[Trajectory]:
    """Return the trajectories whose histories all have at most `max_length` tokens. A longer trajectory is left out
    entirely: truncated, it would be credited with an end that it does not contain. A warning counts and lists them."""
    longer = [trajectory for trajectory in trajectories if _longest(trajectory) > max_length]
    if longer:
        logger.warning(
            "episodes left out of training because a history is longer than model.max_length=%d tokens: %d of %d: %s",
            *(max_length, len(longer), len(trajectories)),
            ", ".join(
                [*(trajectory.id for trajectory in longer[:MAX_LISTED]), *(["…"] if len(longer) > MAX_LISTED else [])]
            ),
        )
    long_ids = {trajectory.id for trajectory in longer}
    return [trajectory for trajectory in trajectories if trajectory.id not in long_ids]


def _longest(trajectory: Trajectory) -> int:
    """Return the number of tokens of the longest history."""
    from components.algorithms.loop.mapped_episodes import MappedTrajectory

    if isinstance(trajectory, MappedTrajectory):
        return trajectory.longest
    return max((len(history.token_ids) for history in trajectory.histories), default=0)
