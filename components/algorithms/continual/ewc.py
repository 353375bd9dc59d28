"""Elastic weight consolidation (arXiv:1612.00796): what was learned before is kept where it matters.

    penalty  =  coefficient / 2 · Σ_i F_i (θ_i - θ*_i)²                              (eq. 3)
    F_i      =  mean over trajectories of (∂ log π(trajectory) / ∂θ_i)²  at θ*

θ* is the anchor: the checkpoint that had learned what is to be kept; the trajectories are those that it learned it
from; log π(trajectory) is the sum over the tokens that are learned of it. θ are the parameters that learn: of
LoRA A and B, each for itself, not their product.

The penalty's gradient is exact, and added once a gradient step, before the clipping of the gradient. Fisher
information and anchor are functions of the stage's inputs; a training that goes on after a kill finds the same ones.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from components.algorithms.foreign import in_own_tokens
from components.algorithms.policy.packing import Sequence_, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.sft.trainer import examples
from components.algorithms.spec import EWCSpec
from components.models.distribution import Cut
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Trajectory

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
"""By name of a parameter."""


@dataclass(frozen=True)
class Anchor:
    """What is held on to."""

    spec: EWCSpec
    checkpoint: Path
    trajectories: Sequence[Trajectory]
    """What it had learned from."""


@dataclass(frozen=True)
class Penalty:
    """Pulls the parameters of a policy back to an anchor."""

    coefficient: float
    fisher: Tensors
    anchor: Tensors

    def add_gradient(self, parameters: dict[str, torch.nn.Parameter]) -> float:
        """Adds coefficient · F_i (θ_i - θ*_i) to the gradient of each; returns the penalty."""
        total = 0.0
        for name, parameter in parameters.items():
            away = parameter.detach().float() - self.anchor[name]
            pull = self.coefficient * self.fisher[name] * away
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            parameter.grad += pull
            total += (pull * away).sum().item() / 2
        return total


def penalty(policy: Policy, anchor: Anchor, base_dir: Path, *, pack_tokens: int, seed: int) -> Penalty:
    """Measured at the anchor; the policy is afterwards as it was before."""
    own = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    policy.load(policy.folder(anchor.checkpoint))
    there = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    fisher = fisher_information(policy, anchor, base_dir, pack_tokens=pack_tokens, seed=seed)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(own[name])
    return Penalty(anchor.spec.coefficient, fisher, there)


def fisher_information(policy: Policy, anchor: Anchor, base_dir: Path, *, pack_tokens: int, seed: int) -> Tensors:
    """Its diagonal, where the policy stands: the empirical one, over at most `spec.trajectories` of them, drawn by the
    seed. Zero without any."""
    sequences: dict[str, list[Sequence_]] = defaultdict(list)
    learned = in_own_tokens(anchor.trajectories, base_dir, sampled=False)
    rows = examples(ChatFormat(load_tokenizer(base_dir)), learned, policy.spec.max_length)
    for row in rows:
        sequences[row["trajectory_id"]].append(Sequence_(row["input_ids"], row["targets"]))
    drawn = random.Random(f"{seed} ewc").sample(list(sequences), min(len(sequences), anchor.spec.trajectories))
    if not drawn:
        log.warning("ewc holds nothing: there are no trajectories that the anchor had learned from")
    total = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in policy.parameters.items()}
    with policy.without_dropout():
        for name in drawn:
            _forget(policy)
            for part in pack(sequences[name], pack_tokens, padded=policy.padded):
                policy.logprobs(part, Cut())[0].sum().backward()
            for key, parameter in policy.parameters.items():
                if parameter.grad is not None:
                    total[key] += parameter.grad.float().square() / len(drawn)
    _forget(policy)
    return total


def _forget(policy: Policy) -> None:
    for parameter in policy.parameters.values():
        parameter.grad = None
