"""Losses of a training API, whose clients choose one by name for each batch: sums over tokens, as its documentation
states them (tinker-docs.thinkingmachines.ai/tinker/losses).

Legend: S tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from components.algorithms.policy_gradient.losses import cispo_loss, clipped_policy_loss, ratio

Inputs = Mapping[str, torch.Tensor]
"""Values of each token, (S,), by name, with the options of the loss."""


@dataclass(frozen=True)
class ClientLoss:
    """A loss that a client can name."""

    inputs: tuple[str, ...]
    """Names of the values of each token that it needs, besides `target_tokens`."""
    options: Mapping[str, float]
    """Default of each option. A client sets it for the batch, or for each token."""
    compute: Callable[[torch.Tensor, Inputs], torch.Tensor]
    """Returns the loss of each token from its log-probability."""


def _cross_entropy(logprob_S: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return -logprob_S * inputs["weights"]


def _importance_sampling(logprob_S: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return -ratio(logprob_S - inputs["logprobs"]) * inputs["advantages"]


def _clips(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distances of the thresholds from 1."""
    return 1 - inputs["clip_low_threshold"], inputs["clip_high_threshold"] - 1


def _ppo(logprob_S: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return clipped_policy_loss(ratio(logprob_S - inputs["logprobs"]), inputs["advantages"], *_clips(inputs))


def _cispo(logprob_S: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return cispo_loss(ratio(logprob_S - inputs["logprobs"]), logprob_S, inputs["advantages"], *_clips(inputs))


def _dro(logprob_S: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return the loss of Direct Reward Optimisation (arXiv:2405.19107)."""
    penalty_S = (logprob_S - inputs["logprobs"]).square()
    return inputs["beta"] / 2 * penalty_S - logprob_S * inputs["advantages"]


_SAMPLED = ("logprobs", "advantages")
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": ClientLoss(("weights",), {}, _cross_entropy),
    "importance_sampling": ClientLoss(_SAMPLED, {}, _importance_sampling),
    "ppo": ClientLoss(_SAMPLED, _CLIPS, _ppo),
    "cispo": ClientLoss(_SAMPLED, _CLIPS, _cispo),
    "dro": ClientLoss(_SAMPLED, {"beta": 0.05}, _dro),
}
"""Losses by name."""
