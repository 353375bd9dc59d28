"""Metrics of a trained reward model: loss and pair accuracy on held-out scenarios, and a check for finite numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from components.algorithms.loop import distributed
from components.algorithms.loop.guards import TrainingGuards
from components.algorithms.reward_models.examples import Example, Pair
from components.algorithms.reward_models.gradient_step import batch_loss, episode_values
from components.algorithms.reward_models.model import RewardModel
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.reward_models.spec import RewardTrainingSpec


def held_out(
    spec: RewardTrainingSpec, policy: RewardModel, examples: Sequence[Example], compared: Mapping[str, Sequence[Pair]]
) -> dict[str, float]:
    """Return the loss on held-out examples and, for each key of `compared`, the accuracy and mean margin of its pairs:
    how often and by how much the better episode has the higher value. The key is the suffix of the metric names. With
    several heads, the accuracy is also reported per head."""
    units = [*examples, *(pair for pairs in compared.values() for pair in pairs)]
    episodes = list({id(episode): episode for example in units for episode in example.episodes}.values())
    if not episodes:
        return {}
    index_of = {id(episode): index for index, episode in enumerate(episodes)}
    score_RH = policy.scores(episodes, spec.pack_tokens, distributed.share)
    measured = {}
    if examples:
        example_episodes = list({id(episode): episode for example in examples for episode in example.episodes}.values())
        first_RH = score_RH[: sum(episode.readings for episode in example_episodes)]  # they come first in `episodes`
        measured["heldout_loss"] = batch_loss(spec, examples, example_episodes, first_RH)[0].item()
    value_EH = episode_values(episodes, score_RH)
    names = list(spec.heads)
    for suffix, pairs in compared.items():
        margins: dict[str, list[float]] = defaultdict(list)
        for pair in pairs:
            better, worse = (value_EH[index_of[id(episode)], pair.head].item() for episode in pair.episodes)
            margins[names[pair.head]].append(better - worse)
        if all_margins := [margin for column in margins.values() for margin in column]:
            measured[f"heldout_accuracy{suffix}"] = sum(margin > 0 for margin in all_margins) / len(all_margins)
            measured[f"heldout_margin{suffix}"] = math.fsum(all_margins) / len(all_margins)
        if len(names) > 1:
            for head, column in sorted(margins.items()):
                measured[f"heldout_accuracy{suffix}/{head}"] = sum(margin > 0 for margin in column) / len(column)
    return measured


def require_finite(
    policy: RewardModel, score_RH: torch.Tensor, guards: TrainingGuards, step: int, trajectories: Sequence[Trajectory]
) -> None:
    """Raise TrainingDiverged if a parameter or a score is not finite."""
    broken_names = [name for name, parameter in policy.parameters.items() if not parameter.isfinite().all()]
    if broken_names or not score_RH.isfinite().all():
        measured = {"not_finite": float(len(broken_names))}
        guards.stop(
            {"step": step, **measured, "trajectories": [trajectory.id for trajectory in trajectories]},
            measured,
            trajectories,
            "not_finite counts trained tensors with infinite or NaN values; at 0, only scores are affected. Lower "
            "algorithm.learning_rate",
        )
