"""Likelihood of stored episodes under a policy, such as held-out rows of imported data.

Tokens and packs are those of supervised fine-tuning: only tokens that the policy would generate count, and a prompt
that episodes share is computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from components.models.spec import ModelSpec
from components.trajectories.groups import have_spread
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.policy.policy import Policy
    from components.trajectories.chat import ChatFormat

EPISODES = 256
"""Largest number of episodes in memory at a time."""


@dataclass(frozen=True)
class EpisodeLikelihood:
    """Log-probability of one episode."""

    id: str
    group: str
    """Scenario; the answers to one prompt share it."""
    reward: float
    accepted: bool
    """True for an episode that supervised fine-tuning would imitate."""
    tokens: int
    logprob: float
    """Sum over its tokens, in nats."""

    @property
    def mean(self) -> float:
        """Log-probability per token."""
        return self.logprob / self.tokens


def episode_likelihoods(
    model: ModelSpec, base_dir: Path, checkpoint: Path | None, episodes: Iterable[Trajectory], pack_tokens: int
) -> Iterator[EpisodeLikelihood]:
    """Yield the likelihood of each scored episode that fits `model.max_length`, under the policy of the checkpoint, or
    the base model. base_dir: local folder of the base model. pack_tokens: maximum tokens of a forward pass."""
    from components.algorithms.policy.policy import Policy
    from components.models.weights import load_tokenizer
    from components.trajectories.chat import ChatFormat

    policy = Policy(base_dir, model, seed=0)
    if checkpoint is not None:
        policy.load(policy.folder(checkpoint))
    chat = ChatFormat(load_tokenizer(base_dir))
    remaining = iter(episodes)
    while batch := list(islice(remaining, EPISODES)):
        yield from _of_batch(policy, chat, batch, pack_tokens)


def _of_batch(
    policy: Policy, chat: ChatFormat, episodes: Sequence[Trajectory], pack_tokens: int
) -> Iterator[EpisodeLikelihood]:
    import torch

    from components.algorithms.policy.packing import TokenSequence, pack
    from components.algorithms.policy_gradient.losses import segment_sums
    from components.algorithms.sft.trainer import examples
    from components.models.distribution import Cut

    scored = [episode for episode in episodes if episode.reward is not None]
    rows = examples(chat, scored, policy.spec.max_length)
    sequences = [TokenSequence(row["input_ids"], row["targets"], role=row["role"]) for row in rows]
    totals = dict.fromkeys((episode.id for episode in scored), 0.0)
    tokens = dict.fromkeys(totals, 0)
    with torch.no_grad(), policy.without_dropout():
        for packed in pack(sequences, pack_tokens, padded=policy.padded, by_role=policy.by_role):
            logprob_S, _ = policy.logprobs(packed, Cut())
            count_Q = packed.sequence_S.to(policy.device).bincount(minlength=len(packed.members))
            for member, total in zip(packed.members, segment_sums(logprob_S, count_Q).tolist(), strict=True):
                totals[rows[member]["trajectory_id"]] += total
                tokens[rows[member]["trajectory_id"]] += len(sequences[member].targets)
    for episode in scored:
        if tokens[episode.id]:
            assert episode.reward is not None
            yield EpisodeLikelihood(
                episode.id, episode.group, episode.reward, episode.success, tokens[episode.id], totals[episode.id]
            )


def summary(likelihoods: Sequence[EpisodeLikelihood]) -> dict[str, float]:
    """Return `loss`, the negative log-likelihood per token of accepted episodes in nats, as the loss of supervised
    fine-tuning; `accuracy`, the share of scenarios whose best episode has a higher log-probability per token than the
    worst; and their counts. Without accepted episodes, or without pairs, that metric is missing."""
    accepted = [likelihood for likelihood in likelihoods if likelihood.accepted]
    tokens = sum(likelihood.tokens for likelihood in accepted)
    pairs = list(_pairs(likelihoods))
    metrics = {"rows": float(len(likelihoods)), "tokens": float(tokens), "pairs": float(len(pairs))}
    if accepted:
        metrics["loss"] = -sum(likelihood.logprob for likelihood in accepted) / tokens
    if pairs:
        metrics["accuracy"] = sum(best.mean > worst.mean for best, worst in pairs) / len(pairs)
    return metrics


def _pairs(likelihoods: Sequence[EpisodeLikelihood]) -> Iterator[tuple[EpisodeLikelihood, EpisodeLikelihood]]:
    """Yield the best and the worst episode of each scenario with different rewards."""
    groups: dict[str, list[EpisodeLikelihood]] = {}
    for likelihood in likelihoods:
        groups.setdefault(likelihood.group, []).append(likelihood)
    for group in groups.values():
        if have_spread([likelihood.reward for likelihood in group]):
            yield max(group, key=lambda member: member.reward), min(group, key=lambda member: member.reward)
