"""Elastic weight consolidation (arXiv:1612.00796): a penalty on changes of the weights that mattered for earlier
training.

    penalty  =  coefficient / 2 · Σ_i F_i (θ_i - θ*_i)²                              (eq. 3)
    F_i      =  mean over trajectories of (∂ log π(trajectory) / ∂θ_i)²  at θ*

θ* is the anchor: the checkpoint whose behaviour is to be preserved. The trajectories are those that it was trained on;
log π(trajectory) is the sum over its trained tokens. θ are the trained parameters: for LoRA, A and B separately, not
their product.

The penalty's gradient is exact, and added once per gradient step, before gradient clipping. Fisher information and
anchor are functions of the stage's inputs, so a resumed training computes the same ones.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from components.algorithms.foreign import convert_foreign_tokens
from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.sft.trainer import examples
from components.algorithms.trainer import Anchor
from components.models.distribution import Cut
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
"""Tensors by parameter name."""


@dataclass(frozen=True)
class QuadraticPenalty:
    """Quadratic penalty that pulls the parameters of a policy towards an anchor."""

    coefficient: float
    fisher: Tensors
    anchor: Tensors

    def add_gradient(self, parameters: dict[str, torch.nn.Parameter]) -> float:
        """Add coefficient · F_i (θ_i - θ*_i) to the gradient of each parameter. Return the penalty."""
        total = 0.0
        for name, parameter in parameters.items():
            difference = parameter.detach().float() - self.anchor[name]
            gradient = self.coefficient * self.fisher[name] * difference
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            parameter.grad += gradient
            total += (gradient * difference).sum().item() / 2
        return total


def penalty(policy: Policy, anchor: Anchor, base_dir: Path, *, pack_tokens: int, seed: int) -> QuadraticPenalty:
    """Return the penalty with the Fisher information measured at the anchor. The policy's weights are restored
    afterwards."""
    current = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    policy.load(policy.folder(anchor.checkpoint))
    anchor_parameters = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    fisher = fisher_information(policy, anchor, base_dir, pack_tokens=pack_tokens, seed=seed)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(current[name])
    return QuadraticPenalty(anchor.spec.coefficient, fisher, anchor_parameters)


def fisher_information(policy: Policy, anchor: Anchor, base_dir: Path, *, pack_tokens: int, seed: int) -> Tensors:
    """Return the diagonal of the empirical Fisher information at the policy's current weights, over at most
    `spec.trajectories` trajectories drawn by the seed; zero without any."""
    sequences: dict[str, list[TokenSequence]] = defaultdict(list)
    trajectories = convert_foreign_tokens(anchor.trajectories, base_dir, sampled=False)
    rows = examples(ChatFormat(load_tokenizer(base_dir)), trajectories, policy.spec.max_length)
    for row in rows:
        sequences[row["trajectory_id"]].append(TokenSequence(row["input_ids"], row["targets"]))
    drawn = random.Random(f"{seed} ewc").sample(list(sequences), min(len(sequences), anchor.spec.trajectories))
    if not drawn:
        log.warning("ewc has no effect: the anchor has no training trajectories")
    total = {
        trajectory_id: torch.zeros_like(parameter, dtype=torch.float32)
        for trajectory_id, parameter in policy.parameters.items()
    }
    with policy.without_dropout():
        for trajectory_id in drawn:
            _clear_gradients(policy)
            for packed in pack(sequences[trajectory_id], pack_tokens, padded=policy.padded):
                policy.logprobs(packed, Cut())[0].sum().backward()
            for name, parameter in policy.parameters.items():
                if parameter.grad is not None:
                    total[name] += parameter.grad.float().square() / len(drawn)
    _clear_gradients(policy)
    return total


def _clear_gradients(policy: Policy) -> None:
    for parameter in policy.parameters.values():
        parameter.grad = None
