"""Gradient step of a reward model: Bradley-Terry on pairs, or squared error to the labels of turns.

The value of an episode is the sum of its readings: one reading for a model of whole episodes, one per turn for a
process reward model. Of two episodes of a scenario, the better one should have the higher value.

A loss is a function of the readings of its batch. Its derivative with respect to each reading is a scalar; the gradient
of the loss is then the gradient of the weighted sum of readings. It is computed pack by pack, in the memory of one
pack.

Legend: E episodes of a batch, R readings, S those of a pack, H heads, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from components.algorithms.loop import checkpoint, distributed
from components.algorithms.loop.epochs import StepMeasures, finish_gradient
from components.algorithms.loop.metrics import token_counts
from components.algorithms.policy_gradient.losses import segment_sums
from components.algorithms.reward_models import losses
from components.algorithms.reward_models.data import RewardEpisode, packs
from components.algorithms.reward_models.examples import Example, LabelledEpisode, Pair
from components.algorithms.reward_models.model import RewardModel

if TYPE_CHECKING:
    from components.algorithms.reward_models.spec import RewardTrainingSpec


def backward(spec: RewardTrainingSpec, policy: RewardModel, batch: Sequence[Example]) -> StepMeasures:
    """Add the gradient of the mean loss to the parameters and scale it down to max_grad_norm. Return the measured
    metrics and token counts."""
    episodes = list({id(episode): episode for example in batch for episode in example.episodes}.values())
    packed_readings = packs(episodes, spec.pack_tokens, padded=policy.padded)
    states = checkpoint.random_states()
    score_RH = policy.scores(episodes, spec.pack_tokens, distributed.share_with_dropout).requires_grad_()
    loss, metrics = batch_loss(spec, batch, episodes, score_RH)
    weight_RH = torch.autograd.grad(loss, score_RH)[0]
    checkpoint.set_random_states(states)  # repeat the dropout of the scores that this is the gradient of
    for (number_S, packed), real in distributed.share_with_dropout(packed_readings):
        weight_SH = weight_RH[number_S.to(policy.device)]
        policy.loss_scale.backward((policy.read(packed) * (weight_SH if real else 0 * weight_SH)).sum())
    gradient = finish_gradient(policy, spec.max_grad_norm)
    counts = token_counts([packed for _, packed in packed_readings])
    del counts["sampled_tokens"]  # a reward model trains on no sampled tokens
    return {"loss": loss.item(), **gradient, **metrics}, counts


def batch_loss(
    spec: RewardTrainingSpec, batch: Sequence[Example], episodes: Sequence[RewardEpisode], score_RH: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the mean loss of a batch as a function of the readings of its episodes, and its metrics."""
    index_of = {id(episode): index for index, episode in enumerate(episodes)}
    if pair_examples := [example for example in batch if isinstance(example, Pair)]:
        value_EH = episode_values(episodes, score_RH)
        chosen_P, rejected_P = (
            value_EH[
                [index_of[id(pair.episodes[side])] for pair in pair_examples], [pair.head for pair in pair_examples]
            ]
            for side in (0, 1)
        )
        margin_P = torch.tensor([pair.margin for pair in pair_examples], device=score_RH.device)
        loss = losses.bradley_terry(chosen_P, rejected_P, margin_P, spec.centering).mean()
        difference_P = (chosen_P - rejected_P).detach()
        return loss, {"margin": difference_P.mean().item(), "accuracy": (difference_P > 0).float().mean().item()}
    by_id = {id(example.episode): example.label_RH for example in batch if isinstance(example, LabelledEpisode)}
    label_RH = torch.tensor([row for episode in episodes for row in by_id[id(episode)]], device=score_RH.device)
    return losses.mean_squared_error(score_RH, label_RH), {}


def episode_values(episodes: Sequence[RewardEpisode], score_RH: torch.Tensor) -> torch.Tensor:
    """Return the (E, H) values of the episodes: the sums of their readings."""
    return segment_sums(score_RH, torch.tensor([episode.readings for episode in episodes], device=score_RH.device))
