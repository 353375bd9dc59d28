"""Trainer of Kahneman-Tversky optimisation (KTO): episodes labelled good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from components.algorithms.loop import distributed
from components.algorithms.policy.packing import TokenSequence
from components.algorithms.preference import losses
from components.algorithms.preference.trainer import Example, PreferenceEpisode, PreferenceTrainer
from components.algorithms.trainer import StepMetrics, TrainingContext

if TYPE_CHECKING:
    from components.algorithms.preference.spec import KTOSpec


class KTOTrainer(PreferenceTrainer):
    """Trainer on single episodes. Those of a batch are followed by mismatched ones, from which the reference point is
    estimated."""

    def __init__(self, spec: KTOSpec, context: TrainingContext):
        super().__init__(spec, context)
        self.spec = spec
        self._members: list[PreferenceEpisode] = []

    def training_examples(self, episodes: Sequence[PreferenceEpisode]) -> list[Example]:
        self._members = list(episodes)
        return [Example((episode,), episode.reward >= self.spec.threshold) for episode in episodes]

    def trained_episodes(self, example: Example) -> Sequence[PreferenceEpisode]:
        return example.episodes[:1]

    def gradient_step(self, batch: Sequence[Example], number: int) -> StepMetrics:
        return super().gradient_step(self.with_mismatched(batch, self._members), number)

    def loss(
        self, batch: Sequence[Example], sum_E: torch.Tensor, reference_E: torch.Tensor, index_of: dict[int, int]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        mismatched = [example.episodes[1] for example in batch]
        references = torch.tensor([episode.reference for episode in mismatched])
        mismatched_sums = torch.tensor(self.logprobs(mismatched, distributed.share_with_dropout))
        kl = (mismatched_sums - references).mean().clamp(min=0).to(sum_E.device)
        row_E = torch.tensor([index_of[id(example.episodes[0])] for example in batch], device=sum_E.device)
        good_E = torch.tensor([example.good for example in batch], device=sum_E.device)
        loss_E = losses.kto(sum_E[row_E], reference_E[row_E], good_E, kl, self.spec.beta)
        weight_E = torch.where(good_E, self.spec.good_weight, self.spec.bad_weight)
        tokens_E = torch.tensor([float(example.episodes[0].tokens) for example in batch], device=sum_E.device)
        likelihood_E = torch.where(good_E, losses.likelihood(sum_E[row_E], tokens_E), 0.0)
        ratio_E = (sum_E - reference_E)[row_E].detach()
        loss = (loss_E * weight_E).mean() + self.spec.likelihood_weight * likelihood_E.mean()
        metrics = {"kl": kl.item()}
        if good_E.any() and not good_E.all():
            metrics["margin"] = self.spec.beta * (ratio_E[good_E].mean() - ratio_E[~good_E].mean()).item()
        return loss, metrics

    def with_mismatched(self, batch: Sequence[Example], episodes: Sequence[PreferenceEpisode]) -> list[Example]:
        """Return each example with another episode's answers after its own prompts, from which the reference point of
        KTO is estimated (arXiv:2402.01306, section 4.1). The other episode is the next one of the shuffled batch from
        another scenario: answers to the same task would fit the prompt, and measure something other than the KL
        divergence."""
        members, longest = [example.episodes[0] for example in batch], self._policy.spec.max_length
        mismatched = []
        for index, episode in enumerate(members):
            following = [*members[index + 1 :], *members[:index]]
            candidates = (other for other in chain(following, episodes) if other.group != episode.group)
            other = next(candidates, following[0] if following else episode)
            mismatched.append(replace(episode, sequences=_after_prompts(episode, other, longest)))
        return [
            replace(example, episodes=(episode, other))
            for example, episode, other in zip(batch, members, self.with_reference(mismatched), strict=True)
        ]


def _after_prompts(episode: PreferenceEpisode, other: PreferenceEpisode, longest: int) -> tuple[TokenSequence, ...]:
    """Return the other episode's tokens, from the first answer of each history on, after the prompt of this episode's
    history; after the last prompt if the other episode has more histories."""
    prompts = [sequence.token_ids[: min(sequence.targets)] for sequence in episode.sequences]
    return tuple(
        _after_prompt(prompts[min(index, len(prompts) - 1)], answers, longest)
        for index, answers in enumerate(other.sequences)
    )


def _after_prompt(prompt: Sequence[int], answers: TokenSequence, longest: int) -> TokenSequence:
    start = min(answers.targets)
    shift = len(prompt) - start
    token_ids = [*prompt, *answers.token_ids[start:]][:longest]
    return TokenSequence(token_ids, [target + shift for target in answers.targets if target + shift < len(token_ids)])
