"""Preference learning on stored trajectories: DPO, IPO, ORPO, KTO (`preference.losses`).

Episodes of one scenario are compared by their rewards (`pairs`), or labelled good or bad by a threshold (KTO). The
log-probability of an episode is the sum over the tokens that the policy sampled, in all its turns and histories;
messages of system, user and tools are conditioned on and never trained on, in chosen and rejected episodes alike.

A loss is a function of these sums. Its derivative with respect to each sum is a scalar; the gradient of the loss is
then the gradient of the weighted sum of log-probabilities. It is computed pack by pack, so a batch of any size needs
the memory of one pack.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from components.algorithms.loop import distributed, schedule
from components.algorithms.loop.checkpoint import random_states, set_random_states
from components.algorithms.loop.epochs import (
    GuardedStep,
    StepMeasures,
    examples_by_step,
    finish_gradient,
    take_gradient_steps,
)
from components.algorithms.loop.metrics import mean_metrics, token_counts
from components.algorithms.loop.token_rows import EpisodeSequences, TokenRow, tokenized
from components.algorithms.policy.packing import Pack, TokenSequence, pack
from components.algorithms.policy_gradient.losses import segment_sums
from components.algorithms.sft.trainer import examples
from components.algorithms.trainer import StepMetrics, Trainer, TrainingContext, TrainingResult
from components.models.distribution import Cut
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.preference.spec import PreferenceSpec


REFERENCE_TOKENS = 2**21
"""Tokens of the episodes whose log-probabilities under the reference are measured together. Limits the memory; prefixes
are shared within these episodes."""


@dataclass(frozen=True, slots=True)
class PreferenceEpisode:
    """An episode as the loss reads it."""

    place: int
    """Position among the trajectories of the training."""
    group: str
    type: str
    """Type of its scenario."""
    reward: float
    sequences: Sequence[TokenSequence]
    """Sequences of its histories."""
    reference: float = 0.0
    """Log-probability under the reference."""

    @property
    def tokens(self) -> int:
        return sum(len(sequence.targets) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Example:
    """One term of the loss."""

    episodes: tuple[PreferenceEpisode, ...]
    """Chosen and rejected; for KTO the episode, and, once in a batch, its prompts followed by another episode's
    answers."""
    good: bool = True
    """True for a good episode; only for KTO."""


class PreferenceTrainer(Trainer):
    """Trainer of a preference algorithm: `spec.epochs` passes over its examples, `spec.batch_size` of them per gradient
    step."""

    has_reference = True
    """True if the loss reads the log-probabilities under the reference."""

    def __init__(self, spec: PreferenceSpec, context: TrainingContext):
        self._settings = spec
        self._context = context
        self._policy = context.policy
        self._guarded_step = GuardedStep(
            spec, context, self._backward, lambda example: context.trajectories[example.episodes[0].place]
        )

    @abstractmethod
    def training_examples(self, episodes: Sequence[PreferenceEpisode]) -> list[Example]:
        """Return the examples of the loss."""

    @abstractmethod
    def loss(
        self, batch: Sequence[Example], sum_E: torch.Tensor, reference_E: torch.Tensor, index_of: dict[int, int]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the mean loss of the batch as a function of the log-probabilities of its episodes, and its metrics.
        index_of: index of each trained episode, by its id()."""

    def trained_episodes(self, example: Example) -> Sequence[PreferenceEpisode]:
        """Return the episodes that the gradient is computed for."""
        return example.episodes

    def train(self) -> TrainingResult:
        spec, context = self._settings, self._context
        training_examples = self.referenced_examples()
        logs = take_gradient_steps(
            context,
            examples_by_step(training_examples, spec.epochs, spec.batch_size, context.seed, context.step),
            self.gradient_step,
            [spec.learning_rate],
            lambda number, done: schedule.share(spec, number, context.rounds, done),
        )
        return context.step + len(logs), {**mean_metrics(logs), "examples": float(len(training_examples))}

    def referenced_examples(self) -> list[Example]:
        """Return the examples of the loss. The log-probability under the reference is measured of their episodes only,
        because pairs leave out others."""
        episodes = self.episodes()
        chosen = self.training_examples(episodes)
        places = {episode.place for example in chosen for episode in example.episodes}
        used = self.with_reference([episode for episode in episodes if episode.place in places])
        by_place = {episode.place: episode for episode in used}
        return [
            replace(example, episodes=tuple(by_place[episode.place] for episode in example.episodes))
            for example in chosen
        ]

    def gradient_step(self, batch: Sequence[Example], number: int) -> StepMetrics:
        """Take gradient step `number` and return its metrics."""
        return self._guarded_step(batch, number)

    def episodes(self) -> list[PreferenceEpisode]:
        """Return the scored episodes whose histories all have at most `max_length` tokens."""
        chat, longest = ChatFormat(load_tokenizer(self._context.base_dir)), self._policy.spec.max_length

        def rows_of(place: int, trajectory: Trajectory) -> list[TokenRow]:
            if trajectory.reward is None or trajectory.failure is not None:
                return []
            sequences = examples(chat, [trajectory], longest)
            if len(sequences) < sum(any(history.sampled_mask()) for history in trajectory.histories):
                return []
            scenario = trajectory.scenario
            facts: dict[str, Any] = {"group": scenario.id, "type": scenario.type, "reward": trajectory.reward}
            return [TokenRow(place, row["input_ids"], row["targets"], **facts) for row in sequences]

        rows = tokenized(self._context.scratch, self._context.trajectories, rows_of)
        group_R, type_R = (_shared_texts(rows.column(name)) for name in ("group", "type"))
        rewards = rows.column("reward").to_pylist()
        episodes, first = [], 0
        for place, members in groupby(rows.column("place").to_pylist()):
            end = first + sum(1 for _ in members)
            sequences = EpisodeSequences(rows, first, end)
            episodes.append(PreferenceEpisode(place, group_R[first], type_R[first], rewards[first], sequences))
            first = end
        return episodes

    def with_reference(self, episodes: Sequence[PreferenceEpisode]) -> list[PreferenceEpisode]:
        """Return the episodes with their log-probability under the reference, if the loss reads it."""
        if not self.has_reference:
            return list(episodes)
        with self._policy.as_reference():
            logprobs = [logprob for part in self._parts(episodes) for logprob in self.logprobs(part)]
        return [replace(episode, reference=logprob) for episode, logprob in zip(episodes, logprobs, strict=True)]

    def _backward(self, batch: Sequence[Example]) -> StepMeasures:
        """Add the gradient of the mean loss to the parameters and scale it down to max_grad_norm. Return the measured
        metrics and token counts."""
        policy = self._policy
        trained = list(
            {id(episode): episode for example in batch for episode in self.trained_episodes(example)}.values()
        )
        packs = self._packs(trained)
        states = random_states()
        sum_E = torch.tensor(self.logprobs(trained, distributed.share_with_dropout), device=policy.device)
        sum_E.requires_grad_()
        reference_E = torch.tensor([episode.reference for episode in trained], device=policy.device)
        index_of = {id(episode): index for index, episode in enumerate(trained)}
        loss, metrics = self.loss(batch, sum_E, reference_E, index_of)
        weight_E = torch.autograd.grad(loss, sum_E)[0]
        set_random_states(states)  # repeat the same packs with the same dropout
        for (owner_Q, packed), real in distributed.share_with_dropout(packs):
            logprob_S, _ = policy.logprobs(packed, Cut())
            weight_S = weight_E[owner_Q.to(policy.device)[packed.sequence_S.to(policy.device)]]
            policy.loss_scale.backward((logprob_S * (weight_S if real else 0 * weight_S)).sum())
        gradient = finish_gradient(policy, self._settings.max_grad_norm)
        return {"loss": loss.item(), **gradient, **metrics}, token_counts([packed for _, packed in packs])

    def logprobs(
        self, episodes: Sequence[PreferenceEpisode], share: distributed.Share = distributed.share
    ) -> list[float]:
        """Return the log-probability of each episode under the policy in its current state, without gradient. share:
        distribution of the packs over processes."""
        policy = self._policy
        total_E = torch.zeros(len(episodes), device=policy.device)
        with torch.no_grad():
            for (owner_Q, packed), real in share(self._packs(episodes)):
                logprob_S, _ = policy.logprobs(packed, Cut())
                if real:
                    owner_S = owner_Q.to(policy.device)[packed.sequence_S.to(policy.device)]
                    total_E += segment_sums(logprob_S, owner_S.bincount(minlength=len(episodes)))
        return distributed.all_reduce_sum(total_E).tolist()

    def _parts(self, episodes: Sequence[PreferenceEpisode]) -> Iterator[list[PreferenceEpisode]]:
        """Yield the episodes in parts of about REFERENCE_TOKENS tokens."""
        part: list[PreferenceEpisode] = []
        tokens = 0
        for episode in episodes:
            part.append(episode)
            tokens += sum(len(sequence.token_ids) for sequence in episode.sequences)
            if tokens >= REFERENCE_TOKENS:
                yield part
                part, tokens = [], 0
        if part:
            yield part

    def _packs(self, episodes: Sequence[PreferenceEpisode]) -> list[tuple[torch.Tensor, Pack]]:
        """Return (index of the episode of each sequence, pack) for each pack."""
        indexed_sequences = [(index, packed) for index, episode in enumerate(episodes) for packed in episode.sequences]
        packs = pack([packed for _, packed in indexed_sequences], self._settings.pack_size, padded=self._policy.padded)
        return [(torch.tensor([indexed_sequences[member][0] for member in packed.members]), packed) for packed in packs]


def _shared_texts(column: pa.Array) -> list[str]:
    """Return the texts of a column, equal ones as the same object."""
    encoded = column.dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    return [texts[index] for index in encoded.indices.to_pylist()]
