"""Training data of a policy gradient: the sampled tokens of trajectories with their advantages, in packs; and the loss
per token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from components.algorithms.policy.packing import Pack, PackPlan, ReadSequences, TokenSequence, plan
from components.algorithms.policy.policy import Policy
from components.algorithms.policy.reference_logprobs import ReferenceLogprobs
from components.algorithms.policy_gradient import losses
from components.models.distribution import Cut
from components.trajectories.schema import Trajectory
from components.trajectories.truncation import is_truncated

if TYPE_CHECKING:
    from components.algorithms.policy_gradient.spec import PolicyGradientSpec

Packs = list[tuple[Cut, PackPlan]]
"""Packs, each with its sampling distribution: sequences sampled from the same kind of distribution are computed
together. A process lays out those that it computes, one after the other."""


class _Place(NamedTuple):
    """A history of a step, with the weight of its tokens in the loss and the number of tokens of its episode."""

    trajectory: Trajectory
    history: int
    weight: float
    episode_tokens: int


SAMPLER_GAP = "sampler_gap"
"""Metric: mean absolute difference of the log-probabilities by the trainer and by the sampler, in nats. Only the first
gradient step of a training has it: later ones measure what the steps before them changed."""


class Learning:
    """Training data of the loss, by trajectory: the advantage of each sampled token, and the log-probabilities of the
    old policy and the reference."""

    def __init__(
        self, spec: PolicyGradientSpec, before: ReferenceLogprobs, *, padded: bool = False, by_role: bool = False
    ):
        self.spec = spec
        self.before = before
        self.padded = padded
        """True if packs are computed as padded rows."""
        self.by_role = by_role
        """True if each role has packs of its own."""
        self.advantages: dict[str, list[float]] = {}
        """Advantages of the sampled tokens over all histories, by trajectory."""
        self.first: dict[str, int] = {}
        """Number of the first sampled token, by trajectory, for packs that carry token numbers."""
        self.scaling: dict[str, float] = {}
        """Metrics of what the returns are divided by (`trainer.scaling_metrics`)."""

    def packs(self, trajectories: Sequence[Trajectory], batch: Sequence[Trajectory] | None = None) -> Packs:
        """Return the packs of the trajectories. batch: trajectories over which the loss is reduced; None: these."""
        reduced = trajectories if batch is None else batch
        learned = {trajectory.id: learned_tokens(self.spec, trajectory) for trajectory in reduced}
        total, participants = sum(learned.values()), sum(count > 0 for count in learned.values())
        by_cut: dict[Cut, list[_Place]] = defaultdict(list)
        for trajectory in trajectories:
            cut_places = by_cut[Cut.of(trajectory)]
            if count := learned[trajectory.id]:
                weight = {
                    "tokens": 1 / total,
                    "sequences": 1 / (count * participants),
                    "constant": 1 / (self.spec.constant_length * participants),
                }[self.spec.normalization]
                histories = range(len(trajectory.histories))
                cut_places += [_Place(trajectory, history, weight, count) for history in histories]
        return [
            (cut, planned)
            for cut, places in by_cut.items()
            for planned in plan(
                ReadSequences(places, self._sequence), self.spec.pack_size, padded=self.padded, by_role=self.by_role
            )
        ]

    def _sequence(self, place: _Place) -> TokenSequence:
        """Return the sequence of a history."""
        trajectory, history = place.trajectory, place.trajectory.histories[place.history]
        targets = history.targets()
        earlier = sum(len(before.targets()) for before in trajectory.histories[: place.history])
        return TokenSequence(
            history.token_ids,
            targets,
            [history.logprobs[index] for index in targets],
            self.advantages[trajectory.id][earlier : earlier + len(targets)],
            place.weight,
            self.before.old(trajectory, place.history),
            self.first.get(trajectory.id, 0) + earlier,
            place.episode_tokens,
            history.agent,
        )


def largest_log_ratio(policy: Policy, learning: Learning, trajectory: Trajectory) -> tuple[int, float]:
    """Return the sampled token of a trajectory, counted from 0 over all its histories, whose log-probability differs
    most from that of the old policy, and the difference in nats."""
    token, largest = 0, 0.0
    for cut, planned in learning.packs([trajectory]):
        packed = planned.lay_out()
        with torch.no_grad(), policy.without_dropout():
            logprob_S, _ = policy.logprobs(packed, cut)
        old_S = packed.old_S if needs_old_logprobs(learning.spec) else packed.logprob_S
        log_ratio_S = losses.log_ratio(logprob_S, old_S.to(logprob_S.device))
        index = int(log_ratio_S.abs().argmax())
        if abs(log_ratio_S[index].item()) >= abs(largest):
            number = int(packed.number_S[index]) - learning.first.get(trajectory.id, 0)
            token, largest = number, log_ratio_S[index].item()
    return token, largest


def needs_old_logprobs(spec: PolicyGradientSpec) -> bool:
    """Return True if the old policy of the ratios is the policy before the first gradient step, as computed by the
    trainer, instead of the sampler.

    The engine's log-probabilities differ by rounding: by little for a token, but by more than GSPO's clip range of 3e-4
    for the mean over a sequence, which would then be clipped before the policy has changed.
    """
    return spec.token_weights is not None or spec.ratio != "token"


def learned_tokens(spec: PolicyGradientSpec, trajectory: Trajectory) -> int:
    """Return the number of tokens of a trajectory that are trained on."""
    if spec.mask_truncated and is_truncated(trajectory):
        return 0
    return sum(len(history.targets()) for history in trajectory.histories)


def policy_loss(
    spec: PolicyGradientSpec, packed: Pack, logprob_S: torch.Tensor, entropy_S: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the (S,) loss of each sampled token, before its weight, and the (S,) columns whose sums `means` reads."""
    columns: dict[str, torch.Tensor] = {}
    old_S = packed.old_S if needs_old_logprobs(spec) else packed.logprob_S
    log_ratio_S = losses.log_ratio(logprob_S, old_S)
    ratio_S = losses.ratio(
        losses.sequence_log_ratio(log_ratio_S, packed.sequence_S, packed.episode_tokens_S, spec.ratio)
    )
    if spec.objective == "cispo":
        loss_S = losses.cispo_loss(ratio_S, logprob_S, packed.advantage_S, spec.clip_low, spec.clip_high)
    else:
        loss_S = losses.clipped_policy_loss(ratio_S, packed.advantage_S, spec.clip_low, spec.clip_high, spec.dual_clip)
    if spec.token_weights:
        trainer_to_sampler_S = losses.by_sequence(
            losses.log_ratio(packed.old_S, packed.logprob_S), packed.sequence_S, spec.correction_level
        )
        correction_S = losses.correction(trainer_to_sampler_S, spec.correction_limit, spec.token_weights)
        loss_S = loss_S * correction_S
        columns["correction"] = correction_S
    with torch.no_grad():
        columns["kl_sampler"] = losses.kl_to_old(logprob_S, packed.logprob_S)
        columns["known"] = torch.isfinite(packed.logprob_S)
        columns[SAMPLER_GAP] = losses.log_ratio(logprob_S, packed.logprob_S).abs()
        columns["kl_old"] = losses.kl_to_old(logprob_S, old_S)
        columns["entropy"] = entropy_S
        columns["clipped"] = losses.clipped(ratio_S, packed.advantage_S, spec.clip_low, spec.clip_high)
    return loss_S, columns


def means(spec: PolicyGradientSpec, sums: dict[str, float], count: int) -> dict[str, float]:
    """Return the metrics from the sums of the columns of `policy_loss` over `count` tokens."""
    return {
        "kl_sampler": sums["kl_sampler"] / max(sums["known"], 1),
        SAMPLER_GAP: sums[SAMPLER_GAP] / max(sums["known"], 1),
        **({"kl_old": sums["kl_old"] / max(count, 1)} if needs_old_logprobs(spec) else {}),
        "entropy": sums["entropy"] / max(count, 1),
        "clip_fraction": sums["clipped"] / max(count, 1),
        **({"correction": sums["correction"] / max(count, 1)} if spec.token_weights is not None else {}),
    }
