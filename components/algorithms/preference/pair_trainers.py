"""Trainers of the algorithms that learn from pairs of episodes: DPO, IPO, ORPO."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from components.algorithms.preference import losses
from components.algorithms.preference.trainer import Example, PreferenceEpisode, PreferenceTrainer
from components.algorithms.trainer import TrainingContext
from components.trajectories.groups import pairs

if TYPE_CHECKING:
    from components.algorithms.preference.spec import DPOSpec, IPOSpec, PairSpec


def pairs_of_type(
    episodes: Sequence[PreferenceEpisode], threshold: float, min_margin: float, seed: int
) -> list[tuple[PreferenceEpisode, PreferenceEpisode]]:
    """Return each episode with a reward of at least `threshold`, with one below it of the same type, drawn at random
    among those whose reward is lower by more than `min_margin`. An episode without such a failure is left out."""
    draw = random.Random(seed)
    failures: dict[str, list[PreferenceEpisode]] = {}
    for episode in episodes:
        if episode.reward < threshold:
            failures.setdefault(episode.type, []).append(episode)
    result = []
    for winner in (episode for episode in episodes if episode.reward >= threshold):
        worse = [failure for failure in failures.get(winner.type, ()) if winner.reward - failure.reward > min_margin]
        if worse:
            result.append((winner, draw.choice(worse)))
    return result


@dataclass(frozen=True)
class PairSide:
    """Episodes of one side of P pairs, chosen or rejected."""

    logprob_P: torch.Tensor
    reference_P: torch.Tensor
    tokens_P: torch.Tensor


class PairTrainer(PreferenceTrainer):
    """Trainer on the pairs of episodes by their rewards."""

    likelihood_weight = 0.0
    """Weight of the likelihood of the chosen episodes that is added to the loss of the pairs."""

    def __init__(self, spec: PairSpec, context: TrainingContext):
        super().__init__(spec, context)
        self.spec = spec

    @abstractmethod
    def pair_loss(self, chosen: PairSide, rejected: PairSide) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss and the (P,) margins."""

    def training_examples(self, episodes: Sequence[PreferenceEpisode]) -> list[Example]:
        spec = self.spec
        if spec.pairs == "type":
            chosen = pairs_of_type(episodes, spec.threshold, spec.min_margin, self._context.seed)
        else:
            chosen = pairs(episodes, lambda episode: episode.reward, spec.pairs, spec.min_margin)
        return [Example(pair) for pair in chosen]

    def loss(
        self, batch: Sequence[Example], sum_E: torch.Tensor, reference_E: torch.Tensor, index_of: dict[int, int]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        def side(number: int) -> PairSide:
            episodes = [example.episodes[number] for example in batch]
            row_P = torch.tensor([index_of[id(episode)] for episode in episodes], device=sum_E.device)
            tokens_P = torch.tensor([float(episode.tokens) for episode in episodes], device=sum_E.device)
            return PairSide(sum_E[row_P], reference_E[row_P], tokens_P)

        chosen = side(0)
        loss, margin_P = self.pair_loss(chosen, side(1))
        margin_P = margin_P.detach()
        likelihood = losses.likelihood(chosen.logprob_P, chosen.tokens_P).mean()
        return loss + self.likelihood_weight * likelihood, {
            "margin": margin_P.mean().item(),
            "accuracy": (margin_P > 0).float().mean().item(),
            "chosen_nll": likelihood.item(),
        }


class DPOTrainer(PairTrainer):
    """Trainer of direct preference optimisation."""

    def __init__(self, spec: DPOSpec, context: TrainingContext):
        super().__init__(spec, context)
        self.likelihood_weight = spec.likelihood_weight
        self._label_smoothing = spec.label_smoothing

    def pair_loss(self, chosen: PairSide, rejected: PairSide) -> tuple[torch.Tensor, torch.Tensor]:
        margin_P = (chosen.logprob_P - chosen.reference_P) - (rejected.logprob_P - rejected.reference_P)
        loss_P = losses.dpo(
            *(chosen.logprob_P, rejected.logprob_P, chosen.reference_P, rejected.reference_P),
            *(self.spec.beta, self._label_smoothing),
        )
        return loss_P.mean(), self.spec.beta * margin_P


class IPOTrainer(PairTrainer):
    """Trainer of identity preference optimisation."""

    def __init__(self, spec: IPOSpec, context: TrainingContext):
        super().__init__(spec, context)
        self.likelihood_weight = spec.likelihood_weight

    def pair_loss(self, chosen: PairSide, rejected: PairSide) -> tuple[torch.Tensor, torch.Tensor]:
        better_P, worse_P = ((side.logprob_P - side.reference_P) / side.tokens_P for side in (chosen, rejected))
        loss_P = losses.ipo(
            *(chosen.logprob_P, rejected.logprob_P, chosen.reference_P, rejected.reference_P),
            *(chosen.tokens_P, rejected.tokens_P, self.spec.beta),
        )
        return loss_P.mean(), better_P - worse_P


class ORPOTrainer(PairTrainer):
    """Trainer of odds ratio preference optimisation."""

    has_reference = False

    def pair_loss(self, chosen: PairSide, rejected: PairSide) -> tuple[torch.Tensor, torch.Tensor]:
        odds_P = losses.orpo(chosen.logprob_P, rejected.logprob_P, chosen.tokens_P, rejected.tokens_P, self.spec.beta)
        likelihood = chosen.logprob_P.sum() / chosen.tokens_P.sum()
        return odds_P.mean() - likelihood, chosen.logprob_P / chosen.tokens_P - rejected.logprob_P / rejected.tokens_P
