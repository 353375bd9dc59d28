"""What came of training a reward model: how it does on scenarios that it was not trained on, and whether its numbers
are finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from components.algorithms.loop import distributed
from components.algorithms.loop.guards import Guards
from components.algorithms.reward_models.examples import Example, Pair
from components.algorithms.reward_models.gradient_step import loss_of, worth
from components.algorithms.reward_models.model import RewardModel
from components.algorithms.spec import RewardTrainingSpec
from components.trajectories.schema import Trajectory


def held_out(
    spec: RewardTrainingSpec, policy: RewardModel, examples: Sequence[Example], compared: Mapping[str, Sequence[Pair]]
) -> dict[str, float]:
    """The loss on what was not trained on; and by the ending of the measures' names, of pairs: how often, and how far,
    the better episode is ahead; by head where there are several."""
    seen = [*examples, *(pair for found in compared.values() for pair in found)]
    episodes = list({id(one): one for example in seen for one in example.episodes}.values())
    if not episodes:
        return {}
    place = {id(one): index for index, one in enumerate(episodes)}
    score_RH = policy.scores(episodes, spec.pack_tokens, distributed.share)
    measured = {}
    if examples:
        own = list({id(one): one for example in examples for one in example.episodes}.values())
        first_RH = score_RH[: sum(one.readings for one in own)]  # they come first in `episodes`
        measured["heldout_loss"] = loss_of(spec, examples, own, first_RH)[0].item()
    worth_EH = worth(episodes, score_RH)
    names = list(spec.heads)
    for end, found in compared.items():
        apart: dict[str, list[float]] = defaultdict(list)
        for pair in found:
            better, worse = (worth_EH[place[id(one)], pair.head].item() for one in pair.episodes)
            apart[names[pair.head]].append(better - worse)
        if flat := [one for column in apart.values() for one in column]:
            measured[f"heldout_accuracy{end}"] = sum(one > 0 for one in flat) / len(flat)
            measured[f"heldout_margin{end}"] = math.fsum(flat) / len(flat)
        if len(names) > 1:
            for head, column in sorted(apart.items()):
                measured[f"heldout_accuracy{end}/{head}"] = sum(one > 0 for one in column) / len(column)
    return measured


def demand_finite(
    policy: RewardModel, score_RH: torch.Tensor, guards: Guards, step: int, trajectories: Sequence[Trajectory]
) -> None:
    broken = [name for name, parameter in policy.parameters.items() if not parameter.isfinite().all()]
    if broken or not score_RH.isfinite().all():
        measured = {"not_finite": float(len(broken))}
        guards.stop(
            {"step": step, **measured, "trajectories": [one.id for one in trajectories]},
            measured,
            trajectories,
            "not_finite counts tensors of the reward model; its scores are infinite or no number. Lower "
            "algorithm.learning_rate",
        )
