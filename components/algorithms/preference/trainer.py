"""Preference learning on stored trajectories: DPO, IPO, ORPO, KTO (`preference.losses`).

Episodes of one scenario are compared by their rewards (`pairs`), or labelled good or bad by a threshold (KTO). The
log-probability of an episode is the sum over the tokens that the policy sampled, in all its turns and histories;
messages of system, user and tools are conditioned on and never trained on, in chosen and rejected episodes alike.

A loss is a function of these sums. Its derivative with respect to each sum is a scalar; the gradient of the loss is
then the gradient of the weighted sum of log-probabilities. It is computed pack by pack, so a batch of any size needs
the memory of one pack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from components.algorithms.loop import distributed, schedule
from components.algorithms.loop.checkpoint import random_states, set_random_states
from components.algorithms.loop.epochs import GuardedStep, finish_gradient, take_gradient_steps
from components.algorithms.loop.metrics import mean_metrics, token_counts
from components.algorithms.policy.packing import Pack, Sequence_, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.gradient_steps import examples_by_step
from components.algorithms.policy_gradient.losses import segment_sums
from components.algorithms.preference import losses
from components.algorithms.preference.pairs import pairs
from components.algorithms.sft.trainer import examples
from components.algorithms.spec import DPOSpec, KTOSpec, ORPOSpec, PairSpec, PreferenceSpec
from components.models.distribution import Cut
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.schema import Trajectory


@dataclass(frozen=True)
class PreferenceEpisode:
    """An episode as the loss reads it."""

    trajectory: Trajectory
    sequences: tuple[Sequence_, ...]
    """Sequences of its histories."""
    reference: float = 0.0
    """Log-probability under the reference."""

    @property
    def tokens(self) -> int:
        return sum(len(sequence.targets) for sequence in self.sequences)


@dataclass(frozen=True)
class Example:
    """One term of the loss."""

    episodes: tuple[PreferenceEpisode, ...]
    """Chosen and rejected; for KTO the episode, and, once in a batch, its prompts followed by another episode's
    answers."""
    good: bool = True
    """True for a good episode; only for KTO."""


def train_preference(
    spec: PreferenceSpec,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    base_dir: Path,
    trajectories: Sequence[Trajectory],
    *,
    step: int,
    seed: int,
    scratch: Path,
    on_step: Callable[[dict[str, float]], None],
    earlier_steps: Sequence[dict[str, float]] = (),
    rounds: schedule.Rounds = schedule.ONLY_ROUND,
) -> tuple[int, dict[str, float]]:
    """Take `spec.epochs` passes over the pairs (KTO: the episodes), `spec.batch_size` of them per gradient step. Return
    the new step count and the mean metrics.

    earlier_steps: metrics of the steps that an interrupted run took after step `step`; policy and optimizer are in the
    state after those steps.

    Raises TrainingDiverged if a guard stops the training (`guards`).
    """
    episodes = _episodes(trajectories, base_dir, policy.spec.max_length)
    if not isinstance(spec, ORPOSpec):
        with policy.as_reference():
            episodes = _measured(policy, episodes, spec)
    if isinstance(spec, KTOSpec):
        training_examples = [
            Example((episode,), (episode.trajectory.reward or 0.0) >= spec.threshold) for episode in episodes
        ]
    else:
        assert isinstance(spec, PairSpec)
        training_examples = _pairs(episodes, spec)
    take_step: GuardedStep[Example] = GuardedStep(
        spec,
        policy,
        optimizer,
        scratch,
        lambda batch: _backward(spec, policy, batch),
        lambda example: example.episodes[0].trajectory,
    )

    def gradient_step(batch: Sequence[Example], number: int) -> dict[str, float]:
        if isinstance(spec, KTOSpec):
            batch = _with_mismatched(batch, episodes, policy, spec)
        return take_step(batch, number)

    logs = take_gradient_steps(
        list(examples_by_step(training_examples, spec.epochs, spec.batch_size, seed, step)),
        gradient_step,
        lambda number, done: spec.learning_rate * schedule.share(spec, number, rounds, done),
        optimizer,
        step=step,
        on_step=on_step,
        earlier_steps=earlier_steps,
    )
    return step + len(logs), {**mean_metrics(logs), "examples": float(len(training_examples))}


# --- training data --------------------------------------------------------------------------------------------------


def _episodes(trajectories: Sequence[Trajectory], base_dir: Path, max_length: int) -> list[PreferenceEpisode]:
    """Return the scored episodes whose histories all have at most `max_length` tokens."""
    scored = [trajectory for trajectory in trajectories if trajectory.reward is not None and trajectory.failure is None]
    rows: dict[str, list[Sequence_]] = defaultdict(list)
    for row in examples(ChatFormat(load_tokenizer(base_dir)), scored, max_length):
        rows[row["trajectory_id"]].append(Sequence_(row["input_ids"], row["targets"]))
    complete = [
        trajectory
        for trajectory in scored
        if len(rows[trajectory.id]) >= sum(any(history.sampled_mask()) for history in trajectory.histories)
    ]
    return [PreferenceEpisode(trajectory, tuple(rows[trajectory.id])) for trajectory in complete if rows[trajectory.id]]


def _measured(policy: Policy, episodes: Sequence[PreferenceEpisode], spec: PreferenceSpec) -> list[PreferenceEpisode]:
    """Return the episodes with their log-probability under the reference, as which the policy currently computes."""
    return [
        replace(episode, reference=logprob)
        for episode, logprob in zip(episodes, _sums(policy, episodes, spec), strict=True)
    ]


def _pairs(episodes: Sequence[PreferenceEpisode], spec: PairSpec) -> list[Example]:
    """Return the pairs of episodes by their rewards."""
    by_id = {episode.trajectory.id: episode for episode in episodes}
    ranked = pairs(
        [episode.trajectory for episode in episodes],
        lambda trajectory: trajectory.reward or 0.0,
        spec.pairs,
        spec.min_margin,
    )
    return [Example((by_id[better.id], by_id[worse.id])) for better, worse in ranked]


def _with_mismatched(
    batch: Sequence[Example], episodes: Sequence[PreferenceEpisode], policy: Policy, spec: KTOSpec
) -> list[Example]:
    """Return each example with another episode's answers after its own prompts, from which the reference point of KTO
    is estimated (arXiv:2402.01306, section 4.1). The other episode is the next one of the shuffled batch from another
    scenario: answers to the same task would fit the prompt, and measure something other than the KL divergence."""
    members = [example.episodes[0] for example in batch]
    mismatched = []
    for index, episode in enumerate(members):
        following = [*members[index + 1 :], *members[:index]]
        candidates = (other for other in [*following, *episodes] if other.trajectory.group != episode.trajectory.group)
        other = next(candidates, following[0] if following else episode)
        mismatched.append(PreferenceEpisode(episode.trajectory, _after_prompts(episode, other, policy.spec.max_length)))
    with policy.as_reference():
        mismatched = _measured(policy, mismatched, spec)
    return [
        replace(example, episodes=(episode, other))
        for example, episode, other in zip(batch, members, mismatched, strict=True)
    ]


def _after_prompts(episode: PreferenceEpisode, other: PreferenceEpisode, longest: int) -> tuple[Sequence_, ...]:
    """Return the other episode's tokens, from the first answer of each history on, after the prompt of this episode's
    history; after the last prompt if the other episode has more histories."""
    prompts = [sequence.token_ids[: min(sequence.targets)] for sequence in episode.sequences]
    return tuple(
        _after_prompt(prompts[min(index, len(prompts) - 1)], answers, longest)
        for index, answers in enumerate(other.sequences)
    )


def _after_prompt(prompt: Sequence[int], answers: Sequence_, longest: int) -> Sequence_:
    start = min(answers.targets)
    shift = len(prompt) - start
    token_ids = [*prompt, *answers.token_ids[start:]][:longest]
    return Sequence_(token_ids, [target + shift for target in answers.targets if target + shift < len(token_ids)])


# --- one gradient step ----------------------------------------------------------------------------------------------


def _backward(
    spec: PreferenceSpec, policy: Policy, batch: Sequence[Example]
) -> tuple[dict[str, float], dict[str, float]]:
    """Add the gradient of the mean loss to the parameters and scale it down to max_grad_norm. Return the measured
    metrics and token counts."""
    trained = list({id(episode): episode for example in batch for episode in _trained_episodes(spec, example)}.values())
    index_of = {id(episode): index for index, episode in enumerate(trained)}
    packs = _packs(policy, trained, spec)
    states = random_states()
    with torch.no_grad():
        sum_E = torch.tensor(_sums(policy, trained, spec, distributed.share_with_dropout), device=policy.device)
        kl = torch.zeros((), device=policy.device)
        if isinstance(spec, KTOSpec):
            mismatched = [example.episodes[1] for example in batch]
            references = torch.tensor([episode.reference for episode in mismatched])
            mismatched_sums = torch.tensor(_sums(policy, mismatched, spec, distributed.share_with_dropout))
            kl = (mismatched_sums - references).mean().clamp(min=0).to(policy.device)
    sum_E.requires_grad_()
    reference_E = torch.tensor([episode.reference for episode in trained], device=policy.device)
    loss, metrics = _loss(spec, batch, sum_E, reference_E, index_of, kl)
    weight_E = torch.autograd.grad(loss, sum_E)[0]
    set_random_states(states)  # repeat the same packs with the same dropout
    for (owner_Q, packed), real in distributed.share_with_dropout(packs):
        logprob_S, _ = policy.logprobs(packed, Cut())
        weight_S = weight_E[owner_Q.to(policy.device)[packed.sequence_S.to(policy.device)]]
        policy.loss_scale.backward((logprob_S * (weight_S if real else 0 * weight_S)).sum())
    measured = {"loss": loss.item(), **finish_gradient(policy, spec.max_grad_norm), **metrics}
    return measured, token_counts([packed for _, packed in packs])


def _trained_episodes(spec: PreferenceSpec, example: Example) -> tuple[PreferenceEpisode, ...]:
    """Return the episodes that the gradient is computed for."""
    return example.episodes[:1] if isinstance(spec, KTOSpec) else example.episodes


def _loss(
    spec: PreferenceSpec,
    batch: Sequence[Example],
    sum_E: torch.Tensor,
    reference_E: torch.Tensor,
    index_of: dict[int, int],
    kl: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the mean loss of the batch as a function of the log-probabilities of its episodes, and its metrics."""
    if isinstance(spec, KTOSpec):
        row_E = torch.tensor([index_of[id(example.episodes[0])] for example in batch], device=sum_E.device)
        good_E = torch.tensor([example.good for example in batch], device=sum_E.device)
        loss_E = losses.kto(sum_E[row_E], reference_E[row_E], good_E, kl, spec.beta)
        weight_E = torch.where(good_E, spec.good_weight, spec.bad_weight)
        ratio_E = (sum_E - reference_E)[row_E].detach()
        gap = ratio_E[good_E].mean() - ratio_E[~good_E].mean()
        return (loss_E * weight_E).mean(), {"margin": spec.beta * gap.item(), "kl": kl.item()}
    chosen_P, rejected_P = (
        torch.tensor([index_of[id(example.episodes[side])] for example in batch], device=sum_E.device)
        for side in (0, 1)
    )
    chosen, rejected, chosen_reference, rejected_reference = (
        sum_E[chosen_P],
        sum_E[rejected_P],
        reference_E[chosen_P],
        reference_E[rejected_P],
    )
    chosen_tokens, rejected_tokens = (
        torch.tensor([float(example.episodes[side].tokens) for example in batch], device=sum_E.device)
        for side in (0, 1)
    )
    if isinstance(spec, ORPOSpec):
        odds_P = losses.orpo(chosen, rejected, chosen_tokens, rejected_tokens, spec.beta)
        loss = odds_P.mean() - chosen.sum() / chosen_tokens.sum()
        margin_P = chosen / chosen_tokens - rejected / rejected_tokens
    elif isinstance(spec, DPOSpec):
        margin_P = spec.beta * ((chosen - chosen_reference) - (rejected - rejected_reference))
        loss = losses.dpo(
            chosen, rejected, chosen_reference, rejected_reference, spec.beta, spec.label_smoothing
        ).mean()
    else:
        margin_P = (chosen - chosen_reference) / chosen_tokens - (rejected - rejected_reference) / rejected_tokens
        loss = losses.ipo(
            chosen, rejected, chosen_reference, rejected_reference, chosen_tokens, rejected_tokens, spec.beta
        ).mean()
    margin_P = margin_P.detach()
    return loss, {"margin": margin_P.mean().item(), "accuracy": (margin_P > 0).float().mean().item()}


def _sums(
    policy: Policy,
    episodes: Sequence[PreferenceEpisode],
    spec: PreferenceSpec,
    share: distributed.Share = distributed.share,
) -> list[float]:
    """Return the log-probability of each episode under the policy in its current state, without gradient. share:
    distribution of the packs over processes."""
    total_E = torch.zeros(len(episodes), device=policy.device)
    with torch.no_grad():
        for (owner_Q, packed), real in share(_packs(policy, episodes, spec)):
            logprob_S, _ = policy.logprobs(packed, Cut())
            if real:
                owner_S = owner_Q.to(policy.device)[packed.sequence_S.to(policy.device)]
                total_E += segment_sums(logprob_S, owner_S.bincount(minlength=len(episodes)))
    return distributed.all_reduce_sum(total_E).tolist()


def _packs(
    policy: Policy, episodes: Sequence[PreferenceEpisode], spec: PreferenceSpec
) -> list[tuple[torch.Tensor, Pack]]:
    """Return (index of the episode of each sequence, pack) for each pack."""
    indexed_sequences = [(index, packed) for index, episode in enumerate(episodes) for packed in episode.sequences]
    packs = pack([packed for _, packed in indexed_sequences], spec.pack_tokens, padded=policy.padded)
    return [(torch.tensor([indexed_sequences[member][0] for member in packed.members]), packed) for packed in packs]
