"""One gradient step of a reward model: Bradley-Terry on pairs, or squared error to the labels of turns.

An episode is worth the sum of its readings: one reading for a model of whole episodes, one for each turn for a process
model. Of two episodes of a scenario the better one should be worth more.

A loss is a function of the readings of its batch. Its derivative by each is a number; the gradient is then that of the
weighted sum of readings, which is computed pack by pack, in the memory of one.

Legend: E episodes of a batch, R readings, S those of a pack, H heads, P pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from components.algorithms.loop import checkpoint, distributed
from components.algorithms.loop.guards import Guards
from components.algorithms.loop.metrics import of_packs
from components.algorithms.policy import sharded
from components.algorithms.policy_gradient.gradient_steps import finite_step
from components.algorithms.policy_gradient.losses import segment_sums
from components.algorithms.reward_models import losses
from components.algorithms.reward_models.data import Episode, packs
from components.algorithms.reward_models.examples import Example, Labelled, Pair
from components.algorithms.reward_models.model import RewardModel
from components.algorithms.spec import RewardTrainingSpec
from components.trajectories.schema import Trajectory


def gradient_step(
    spec: RewardTrainingSpec,
    policy: RewardModel,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Example],
    step: int,
    guards: Guards,
) -> dict[str, float]:
    """Takes the step, unless a guard leaves it out; returns what is told of it. Raises TrainingDiverged where one
    stops."""
    return finite_step(
        optimizer,
        lambda: backward(spec, policy, batch),
        lambda measured: _struck(spec, policy, batch, measured, step, guards),
        policy.loss_scale,
    )


def backward(
    spec: RewardTrainingSpec, policy: RewardModel, batch: Sequence[Example]
) -> tuple[dict[str, float], dict[str, float]]:
    """Adds the gradient of the mean loss to the parameters and scales the whole down to max_grad_norm. Returns what it
    measured, and counts of tokens."""
    episodes = list({id(one): one for example in batch for one in example.episodes}.values())
    packed = packs(episodes, spec.pack_tokens, padded=policy.padded)
    before = checkpoint.random_states()
    score_RH = policy.scores(episodes, spec.pack_tokens, distributed.share_drawing).requires_grad_()
    loss, seen = loss_of(spec, batch, episodes, score_RH)
    weight_RH = torch.autograd.grad(loss, score_RH)[0]
    checkpoint.set_random_states(before)  # so that the same drops out as in the scores of which this is the gradient
    for (number_S, one), real in distributed.share_drawing(packed):
        weight_SH = weight_RH[number_S.to(policy.device)]
        policy.loss_scale.backward((policy.read(one) * (weight_SH if real else 0 * weight_SH)).sum())
    distributed.sum_gradients(policy.parameters.values())
    policy.loss_scale.unscale(policy.parameters.values())
    grad_norm = sharded.clip(policy.parameters.values(), spec.max_grad_norm)
    counts = of_packs([one for _, one in packed])
    del counts["sampled_tokens"]  # nothing is read but their places
    return {"loss": loss.item(), "grad_norm": grad_norm, **seen}, counts


def loss_of(
    spec: RewardTrainingSpec, batch: Sequence[Example], episodes: Sequence[Episode], score_RH: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean loss of a batch as a function of the readings of its episodes, and what is worth showing."""
    place = {id(one): index for index, one in enumerate(episodes)}
    if found := [example for example in batch if isinstance(example, Pair)]:
        worth_EH = worth(episodes, score_RH)
        chosen_P, rejected_P = (
            worth_EH[[place[id(one.episodes[side])] for one in found], [one.head for one in found]] for side in (0, 1)
        )
        margin_P = torch.tensor([one.margin for one in found], device=score_RH.device)
        loss = losses.bradley_terry(chosen_P, rejected_P, margin_P, spec.centering).mean()
        apart_P = (chosen_P - rejected_P).detach()
        return loss, {"margin": apart_P.mean().item(), "accuracy": (apart_P > 0).float().mean().item()}
    by_id = {id(example.episode): example.label_RH for example in batch if isinstance(example, Labelled)}
    label_RH = torch.tensor([row for one in episodes for row in by_id[id(one)]], device=score_RH.device)
    return losses.mean_squared_error(score_RH, label_RH), {}


def worth(episodes: Sequence[Episode], score_RH: torch.Tensor) -> torch.Tensor:
    """(E, H) what each episode is worth: the sum of its readings."""
    return segment_sums(score_RH, torch.tensor([one.readings for one in episodes], device=score_RH.device))


def _struck(
    spec: RewardTrainingSpec,
    policy: RewardModel,
    batch: Sequence[Example],
    measured: Mapping[str, float],
    step: int,
    guards: Guards,
) -> bool:
    """Whether the step is left out; each episode is measured with the examples that it comes first in."""
    of: dict[str, list[Example]] = defaultdict(list)
    for example in batch:
        of[example.episodes[0].trajectory.id].append(example)

    def measure(trajectory: Trajectory) -> dict[str, float]:
        for parameter in policy.parameters.values():
            parameter.grad = None
        found, _ = backward(spec, policy, of[trajectory.id])
        return {name: found[name] for name in ("loss", "grad_norm")}

    return guards.strike(
        "non_finite",
        spec.non_finite,
        step,
        {name: measured[name] for name in ("loss", "grad_norm")},
        [examples[0].episodes[0].trajectory for examples in of.values()],
        measure,
        by="grad_norm",
        advice=policy.loss_scale.advice("Lower algorithm.learning_rate"),
    )
