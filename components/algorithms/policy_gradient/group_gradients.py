"""Policy gradients of parts of a batch, such as one group, at the policy that a training starts from.

The gradient of a part is its share of the trainer's loss (`trainer.add_gradient`) on the whole batch: advantages and
weights are those of the batch, so the gradients of all groups sum to the gradient of the batch, as if the training took
one step on it. Dropout is off, and neither gradient clipping nor the penalty of `ewc` is included, because both belong
to a step, not to a group.

A gradient is one flat float32 vector over the trained parameters: those of the adapter, or all weights. It is the
gradient of a loss: a step moves the parameters against it. Dot products are computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from components.algorithms.policy.policy import Policy
from components.algorithms.policy.reference_logprobs import ReferenceLogprobs
from components.algorithms.policy_gradient.gradient_steps import Group
from components.algorithms.policy_gradient.trainer import add_gradient, prepare
from components.algorithms.policy_gradient.training_data import Learning, Packs, learned_tokens
from components.algorithms.trainer import TrainingContext
from components.errors import ArtifactError
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.policy_gradient.spec import GRPOSpec

LIKELIHOOD: dict[str, Any] = {
    "objective": "clip",
    "ratio": "token",
    "normalization": "constant",
    "constant_length": 1,
    "correction": "none",
    "mask_truncated": False,
    "entropy_coefficient": 0.0,
    "kl_coefficient": 0.0,
}
"""Settings with which the policy loss of a token with advantage 1 is its negative log-likelihood, to first order."""
UNKNOWN = float("nan")
"""Log-probability of a token with an unknown sampler: the loss treats it as on-policy, with a ratio of 1."""


class PolicyGradients:
    """Gradients of the groups of one batch, as `trainer.GroupGradients`."""

    def __init__(self, spec: GRPOSpec, context: TrainingContext):
        self._spec = spec
        self._policy = context.policy
        self._scratch = context.scratch
        groups, self._learning = prepare(spec, context)
        self.groups: dict[str, Group] = {group[0].group: group for group in groups}
        self._batch = [trajectory for group in groups for trajectory in group]
        self._tokens = _tokens(self._learning.packs(self._batch))

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._policy.parameters.values())

    def group(self, name: str) -> torch.Tensor:
        packs = self._learning.packs(self.groups[name], self._batch)
        return _flat_gradient(self._spec, self._policy, packs, self._tokens)

    def batch(self) -> torch.Tensor:
        return _flat_gradient(self._spec, self._policy, self._learning.packs(self._batch), self._tokens)

    def likelihood(self, trajectory: Trajectory, temperature: float) -> torch.Tensor:
        """Return the gradient of the policy loss with ratio, advantage and weight 1."""
        spec = self._spec.model_copy(update=LIKELIHOOD)
        histories = [replace(history, logprobs=[UNKNOWN] * len(history.token_ids)) for history in trajectory.histories]
        on_policy = replace(_sampled_at(trajectory, temperature), histories=histories)
        learning = Learning(spec, ReferenceLogprobs(Path()), padded=self._policy.padded, by_role=self._policy.by_role)
        learning.advantages[on_policy.id] = [1.0] * learned_tokens(spec, on_policy)
        packs = learning.packs([on_policy])
        return _flat_gradient(spec, self._policy, packs, _tokens(packs))

    def log_likelihoods(self, trajectories: Sequence[Trajectory], temperature: float) -> list[float]:
        measured = ReferenceLogprobs(self._scratch)
        sampled = [_sampled_at(trajectory, temperature) for trajectory in trajectories]
        measured.measure(self._policy, sampled, self._spec.pack_size, reference=False, first=True)
        return [math.fsum(measured.whole("old", trajectory)) for trajectory in sampled]


def dot(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the dot product of two gradients, computed in float64."""
    return float(left.double() @ right.double())


def norm(gradient: torch.Tensor) -> float:
    """Return the L2 norm of a gradient, computed in float64."""
    return float(dot(gradient, gradient) ** 0.5)


def cosine(left: torch.Tensor, right: torch.Tensor) -> float | None:
    """Return the cosine of two gradients, computed in float64; None if one is zero."""
    norms = norm(left) * norm(right)
    return dot(left, right) / norms if norms else None


def _sampled_at(trajectory: Trajectory, temperature: float) -> Trajectory:
    """Return the trajectory as sampled from the whole distribution at a temperature."""
    return replace(trajectory, sampling={"temperature": temperature})


def _tokens(packs: Packs) -> int:
    return sum(planned.sampled for _, planned in packs)


def _flat_gradient(spec: GRPOSpec, policy: Policy, packs: Packs, tokens: int) -> torch.Tensor:
    """Return the gradient of the loss on these packs. tokens: number of tokens of the batch that they belong to.
    Raises ArtifactError for a gradient that is not finite."""
    parameters = list(policy.parameters.values())
    for parameter in parameters:
        parameter.grad = None
    try:
        with policy.without_dropout():
            add_gradient(spec, policy, packs, tokens)
        flat = torch.cat(
            [
                torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.float().cpu().reshape(-1)
                for parameter in parameters
            ]
        )
    finally:
        for parameter in parameters:
            parameter.grad = None
    if not torch.isfinite(flat).all():
        advice = policy.loss_scale.advice("Check the learning rate of the run")
        raise ArtifactError(f"the policy gradient has infinite or NaN values. {advice}")
    return flat
