"""What a policy gradient learns from: the sampled tokens of trajectories with their advantages, in packs; and the loss
of a token, given both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from components.algorithms.policy.packing import Pack, Sequence_, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy.reference_logprobs import Before
from components.algorithms.policy_gradient import losses
from components.algorithms.spec import PolicyGradientSpec
from components.models.distribution import Cut
from components.trajectories.schema import Trajectory

Packs = list[tuple[Cut, Pack]]
"""What was sampled from the same kind of distribution is computed together."""


class Learning:
    """What the loss needs to know of each trajectory: the advantage of each of its sampled tokens, and what two other
    policies say of them."""

    def __init__(self, spec: PolicyGradientSpec, before: Before, *, padded: bool = False):
        self.spec = spec
        self.before = before
        self.padded = padded
        """Whether packs are computed as padded rows."""
        self.advantages: dict[str, list[float]] = {}
        """By trajectory; of its sampled tokens, over all histories."""
        self.first: dict[str, int] = {}
        """By trajectory; number of its first sampled token, where packs are to carry numbers."""

    def packs(self, trajectories: Sequence[Trajectory]) -> Packs:
        """The trajectories as they are computed."""
        by_cut: dict[Cut, list[Sequence_]] = defaultdict(list)
        for trajectory, sequences in zip(trajectories, self._sequences(trajectories), strict=True):
            by_cut[Cut.of(trajectory)] += sequences
        return [
            (cut, one) for cut, each in by_cut.items() for one in pack(each, self.spec.pack_tokens, padded=self.padded)
        ]

    def _sequences(self, trajectories: Sequence[Trajectory]) -> list[list[Sequence_]]:
        """The histories of each trajectory."""
        learned = [learned_tokens(self.spec, trajectory) for trajectory in trajectories]
        total, taking_part = sum(learned), sum(own > 0 for own in learned)
        made: list[list[Sequence_]] = []
        for trajectory, own in zip(trajectories, learned, strict=True):
            made.append([])
            if not own:
                continue
            weight = {
                "tokens": 1 / total,
                "sequences": 1 / (own * taking_part),
                "constant": 1 / (self.spec.constant_length * taking_part),
            }[self.spec.normalization]
            given = iter(self.advantages[trajectory.id])
            first = self.first.get(trajectory.id, 0)
            for place, history in enumerate(trajectory.histories):
                targets = [index for index, is_sampled in enumerate(history.sampled_mask()) if is_sampled]
                made[-1].append(
                    Sequence_(
                        history.token_ids,
                        targets,
                        [history.logprobs[index] for index in targets],
                        [next(given) for _ in targets],
                        weight,
                        self.before.old(trajectory, place),
                        first,
                        own,
                    )
                )
                first += len(targets)
        return made


def largest_log_ratio(policy: Policy, learning: Learning, trajectory: Trajectory) -> tuple[int, float]:
    """Return the sampled token of a trajectory, counted from 0 over all its histories, whose log-probability has moved
    furthest from that of the policy before, and by how many nats."""
    token, largest = 0, 0.0
    for cut, given in learning.packs([trajectory]):
        with torch.no_grad(), policy.without_dropout():
            logprob_S, _ = policy.logprobs(given, cut)
        old_S = given.old_S if needs_old_logprobs(learning.spec) else given.logprob_S
        moved_S = losses.log_ratio(logprob_S, old_S.to(logprob_S.device))
        place = int(moved_S.abs().argmax())
        if abs(moved_S[place].item()) >= abs(largest):
            number = int(given.number_S[place]) - learning.first.get(trajectory.id, 0)
            token, largest = number, moved_S[place].item()
    return token, largest


def needs_old_logprobs(spec: PolicyGradientSpec) -> bool:
    """Return whether ratios are taken to the trainer's own log-probabilities before the first gradient step.

    Those of the engine differ by rounding: by little for a token, by more than GSPO's clip range of 3e-4 for the mean
    over a sequence, which would then be clipped before the policy has moved.
    """
    return spec.token_weights is not None or spec.ratio != "token"


def learned_tokens(spec: PolicyGradientSpec, trajectory: Trajectory) -> int:
    """How many of its tokens are learned from."""
    if spec.mask_truncated and _truncated(trajectory):
        return 0
    return sum(sum(history.sampled_mask()) for history in trajectory.histories)


def policy_loss(
    spec: PolicyGradientSpec, one: Pack, logprob_S: torch.Tensor, entropy_S: torch.Tensor, sums: dict[str, float]
) -> torch.Tensor:
    """(S,) loss of each sampled token, before its weight. What it says of the policy is added to `sums`; `means` reads
    them."""
    old_S = one.old_S if needs_old_logprobs(spec) else one.logprob_S
    log_ratio_S = losses.log_ratio(logprob_S, old_S)
    ratio_S = losses.ratio(losses.sequence_log_ratio(log_ratio_S, one.sequence_S, one.episode_tokens_S, spec.ratio))
    if spec.objective == "cispo":
        loss_S = losses.cispo_loss(ratio_S, logprob_S, one.advantage_S, spec.clip_low, spec.clip_high)
    else:
        loss_S = losses.clipped_policy_loss(ratio_S, one.advantage_S, spec.clip_low, spec.clip_high, spec.dual_clip)
    if spec.token_weights:
        away_S = losses.by_sequence(losses.log_ratio(one.old_S, one.logprob_S), one.sequence_S, spec.correction_level)
        corrected_S = losses.correction(away_S, spec.correction_limit, spec.token_weights)
        loss_S = loss_S * corrected_S
        sums["correction"] += corrected_S.sum().item()
    with torch.no_grad():
        known_S = torch.isfinite(one.logprob_S)
        sums["kl_sampler"] += losses.kl_to_old(logprob_S, one.logprob_S).sum().item()
        sums["known"] += known_S.sum().item()
        sums["kl_old"] += losses.kl_to_old(logprob_S, old_S).sum().item()
        sums["entropy"] += entropy_S.sum().item()
        sums["clipped"] += losses.clipped(ratio_S, one.advantage_S, spec.clip_low, spec.clip_high).sum().item()
    return loss_S


def means(spec: PolicyGradientSpec, sums: dict[str, float], count: int) -> dict[str, float]:
    """What `policy_loss` added up over `count` tokens, as metrics."""
    return {
        "kl_sampler": sums["kl_sampler"] / max(sums["known"], 1),
        **({"kl_old": sums["kl_old"] / max(count, 1)} if needs_old_logprobs(spec) else {}),
        "entropy": sums["entropy"] / max(count, 1),
        "clip_fraction": sums["clipped"] / max(count, 1),
        **({"correction": sums["correction"] / max(count, 1)} if spec.token_weights is not None else {}),
    }


def _truncated(trajectory: Trajectory) -> bool:
    return any(message.finish_reason == "length" for history in trajectory.histories for message in history.messages)
