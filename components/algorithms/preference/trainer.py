"""Preference learning on stored trajectories: DPO, IPO, ORPO, KTO (`preference_losses`).

Episodes of one scenario are compared by their rewards (`pairs`), or called good or bad by a threshold (KTO). The
log-probability of an episode is the sum over the tokens that the policy sampled, in all its turns and histories; what
the system, the user and tools said is conditioned on and never learned, in chosen and rejected alike.

A loss is a function of those sums. Its derivative by each sum is a number; the gradient is then that of the weighted
sum of log-probabilities, which is computed pack by pack, so that a batch of any size needs the memory of one pack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from components.algorithms.loop import distributed, schedule
from components.algorithms.loop.checkpoint import random_states, set_random_states
from components.algorithms.loop.guards import Guards
from components.algorithms.loop.metrics import of_packs, over_steps
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Pack, Sequence_, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.gradient_steps import examples_by_step, finite_step
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
class Episode:
    """What is compared."""

    trajectory: Trajectory
    sequences: tuple[Sequence_, ...]
    """Its histories."""
    reference: float = 0.0
    """Its log-probability under the reference."""

    @property
    def tokens(self) -> int:
        return sum(len(one.targets) for one in self.sequences)


@dataclass(frozen=True)
class Example:
    """One term of the loss."""

    episodes: tuple[Episode, ...]
    """Chosen and rejected; for KTO the episode, and, once it is in a batch, another one's answers after its prompt."""
    good: bool = True
    """For KTO."""


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
    taken: Sequence[dict[str, float]] = (),
    rounds: schedule.Rounds = schedule.ONLY_ROUND,
) -> tuple[int, dict[str, float]]:
    """Take `spec.epochs` passes over the pairs (KTO: the episodes), `spec.batch_size` of them a gradient step. Return
    the new step count and the mean metrics.

    taken: metrics of the steps that an earlier try took after step `step`; policy and optimizer are those after them.

    Raises TrainingDiverged where a guard stops (`guards`).
    """
    guards = Guards(scratch)
    episodes = _episodes(trajectories, base_dir, policy.spec.max_length)
    if not isinstance(spec, ORPOSpec):
        with policy.as_reference():
            episodes = _measured(policy, episodes, spec)
    if isinstance(spec, KTOSpec):
        found = [Example((one,), (one.trajectory.reward or 0.0) >= spec.threshold) for one in episodes]
    else:
        assert isinstance(spec, PairSpec)
        found = _pairs(episodes, spec)
    logs = list(taken)
    batches = list(examples_by_step(found, spec.epochs, spec.batch_size, seed, step))
    for index, batch in enumerate(batches):
        if index < len(taken):
            continue
        number = step + index + 1
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * schedule.share(spec, number, rounds, index / len(batches))
        if isinstance(spec, KTOSpec):
            batch = _with_mismatched(batch, episodes, policy, spec)
        metrics = {"step": float(number), **_gradient_step(spec, policy, optimizer, batch, number, guards)}
        logs.append(metrics)
        on_step(metrics)
    return step + len(logs), {**over_steps(logs), "examples": float(len(found))}


# --- what is compared -----------------------------------------------------------------------------------------------


def _episodes(trajectories: Sequence[Trajectory], base_dir: Path, max_length: int) -> list[Episode]:
    """Those that are scored and whole: an episode of which a history is too long is left out."""
    scored = [one for one in trajectories if one.reward is not None and one.failure is None]
    rows: dict[str, list[Sequence_]] = defaultdict(list)
    for row in examples(ChatFormat(load_tokenizer(base_dir)), scored, max_length):
        rows[row["trajectory_id"]].append(Sequence_(row["input_ids"], row["targets"]))
    whole = [one for one in scored if len(rows[one.id]) >= sum(any(h.sampled_mask()) for h in one.histories)]
    return [Episode(one, tuple(rows[one.id])) for one in whole if rows[one.id]]


def _measured(policy: Policy, episodes: Sequence[Episode], spec: PreferenceSpec) -> list[Episode]:
    """The same with their log-probability under the reference, which the policy stands for now."""
    return [replace(one, reference=sum_) for one, sum_ in zip(episodes, _sums(policy, episodes, spec), strict=True)]


def _pairs(episodes: Sequence[Episode], spec: PairSpec) -> list[Example]:
    """The pairs of episodes by their rewards."""
    by_id = {one.trajectory.id: one for one in episodes}
    found = pairs([one.trajectory for one in episodes], lambda one: one.reward or 0.0, spec.pairs, spec.min_margin)
    return [Example((by_id[better.id], by_id[worse.id])) for better, worse in found]


def _with_mismatched(
    batch: Sequence[Example], episodes: Sequence[Episode], policy: Policy, spec: KTOSpec
) -> list[Example]:
    """Each example of a shuffled batch with the answers of another episode after its own prompt, from which the
    reference point of KTO is estimated (arXiv:2402.01306, section 4.1). The other one is the next in the batch of
    another scenario: answers to the same task would fit the prompt, and measure something else than the KL."""
    members = [example.episodes[0] for example in batch]
    mismatched = []
    for index, episode in enumerate(members):
        following = [*members[index + 1 :], *members[:index]]
        foreign = (other for other in [*following, *episodes] if other.trajectory.group != episode.trajectory.group)
        other = next(foreign, following[0] if following else episode)
        mismatched.append(Episode(episode.trajectory, _after_prompts(episode, other, policy.spec.max_length)))
    with policy.as_reference():
        mismatched = _measured(policy, mismatched, spec)
    return [
        replace(example, episodes=(episode, other))
        for example, episode, other in zip(batch, members, mismatched, strict=True)
    ]


def _after_prompts(one: Episode, other: Episode, longest: int) -> tuple[Sequence_, ...]:
    """Return what the other said, from the first answer of each history on, after the prompt of this one's history;
    after the last prompt where the other has more histories."""
    prompts = [own.token_ids[: min(own.targets)] for own in one.sequences]
    return tuple(
        _after_prompt(prompts[min(place, len(prompts) - 1)], theirs, longest)
        for place, theirs in enumerate(other.sequences)
    )


def _after_prompt(prompt: Sequence[int], theirs: Sequence_, longest: int) -> Sequence_:
    start = min(theirs.targets)
    shift = len(prompt) - start
    token_ids = [*prompt, *theirs.token_ids[start:]][:longest]
    return Sequence_(token_ids, [target + shift for target in theirs.targets if target + shift < len(token_ids)])


# --- one gradient step ----------------------------------------------------------------------------------------------


def _gradient_step(
    spec: PreferenceSpec,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: list[Example],
    step: int,
    guards: Guards,
) -> dict[str, float]:
    return finite_step(
        optimizer,
        lambda: _backward(spec, policy, batch),
        lambda measured: _struck(spec, policy, batch, measured, step, guards),
        policy.loss_scale,
    )


def _backward(
    spec: PreferenceSpec, policy: Policy, batch: Sequence[Example]
) -> tuple[dict[str, float], dict[str, float]]:
    """Adds the gradient of the mean loss to the parameters and scales the whole down to max_grad_norm. Returns what it
    measured, and counts of tokens."""
    learned = list({id(one): one for example in batch for one in _learned(spec, example)}.values())
    place = {id(one): index for index, one in enumerate(learned)}
    packs = _packs(policy, learned, spec)
    drawn = random_states()
    with torch.no_grad():
        sum_E = torch.tensor(_sums(policy, learned, spec, distributed.share_drawing), device=policy.device)
        kl = torch.zeros((), device=policy.device)
        if isinstance(spec, KTOSpec):
            mismatched = [example.episodes[1] for example in batch]
            references = torch.tensor([one.reference for one in mismatched])
            theirs = torch.tensor(_sums(policy, mismatched, spec, distributed.share_drawing))
            kl = (theirs - references).mean().clamp(min=0).to(policy.device)
    sum_E.requires_grad_()
    reference_E = torch.tensor([one.reference for one in learned], device=policy.device)
    loss, seen = _loss(spec, batch, sum_E, reference_E, place, kl)
    weight_E = torch.autograd.grad(loss, sum_E)[0]
    set_random_states(drawn)  # the same packs again, and the same dropout
    for (owner_Q, one), real in distributed.share_drawing(packs):
        logprob_S, _ = policy.logprobs(one, Cut())
        weight_S = weight_E[owner_Q.to(policy.device)[one.sequence_S.to(policy.device)]]
        policy.loss_scale.backward((logprob_S * (weight_S if real else 0 * weight_S)).sum())
    distributed.sum_gradients(policy.parameters.values())
    policy.loss_scale.unscale(policy.parameters.values())
    if policy.penalty:
        seen = {**seen, "ewc": policy.add_penalty()}
    grad_norm = sharded.clip(policy.parameters.values(), spec.max_grad_norm)
    return {"loss": loss.item(), "grad_norm": grad_norm, **seen}, of_packs([one for _, one in packs])


def _learned(spec: PreferenceSpec, example: Example) -> tuple[Episode, ...]:
    """The episodes of which the gradient is taken."""
    return example.episodes[:1] if isinstance(spec, KTOSpec) else example.episodes


def _loss(
    spec: PreferenceSpec,
    batch: Sequence[Example],
    sum_E: torch.Tensor,
    reference_E: torch.Tensor,
    place: dict[int, int],
    kl: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean loss of the batch as a function of the log-probabilities of its episodes, and what is worth showing."""
    if isinstance(spec, KTOSpec):
        row_E = torch.tensor([place[id(example.episodes[0])] for example in batch], device=sum_E.device)
        good_E = torch.tensor([example.good for example in batch], device=sum_E.device)
        loss_E = losses.kto(sum_E[row_E], reference_E[row_E], good_E, kl, spec.beta)
        weight_E = torch.where(good_E, spec.good_weight, spec.bad_weight)
        ratio_E = (sum_E - reference_E)[row_E].detach()
        gap = ratio_E[good_E].mean() - ratio_E[~good_E].mean()
        return (loss_E * weight_E).mean(), {"margin": spec.beta * gap.item(), "kl": kl.item()}
    chosen_P, rejected_P = (
        torch.tensor([place[id(example.episodes[side])] for example in batch], device=sum_E.device) for side in (0, 1)
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
    policy: Policy, episodes: Sequence[Episode], spec: PreferenceSpec, share: distributed.Share = distributed.share
) -> list[float]:
    """The log-probability of each episode as the policy is now; without gradient. share: of the packs, by process."""
    total_E = torch.zeros(len(episodes), device=policy.device)
    with torch.no_grad():
        for (owner_Q, one), real in share(_packs(policy, episodes, spec)):
            logprob_S, _ = policy.logprobs(one, Cut())
            if real:
                owner_S = owner_Q.to(policy.device)[one.sequence_S.to(policy.device)]
                total_E += segment_sums(logprob_S, owner_S.bincount(minlength=len(episodes)))
    return distributed.add_up(total_E).tolist()


def _packs(policy: Policy, episodes: Sequence[Episode], spec: PreferenceSpec) -> list[tuple[torch.Tensor, Pack]]:
    """(index of the episode to which each sequence belongs, pack)."""
    places = [(index, one) for index, episode in enumerate(episodes) for one in episode.sequences]
    packs = pack([one for _, one in places], spec.pack_tokens, padded=policy.padded)
    return [(torch.tensor([places[member][0] for member in one.members]), one) for one in packs]


def _struck(
    spec: PreferenceSpec,
    policy: Policy,
    batch: Sequence[Example],
    measured: dict[str, float],
    step: int,
    guards: Guards,
) -> bool:
    """Whether the step is left out; each example is measured by itself."""
    of = {example.episodes[0].trajectory.id: example for example in batch}

    def measure(trajectory: Trajectory) -> dict[str, float]:
        for parameter in policy.parameters.values():
            parameter.grad = None
        found, _ = _backward(spec, policy, [of[trajectory.id]])
        return {name: found[name] for name in ("loss", "grad_norm")}

    return guards.strike(
        "non_finite",
        spec.non_finite,
        step,
        {name: measured[name] for name in ("loss", "grad_norm")},
        [example.episodes[0].trajectory for example in batch],
        measure,
        by="grad_norm",
        advice=policy.loss_scale.advice("Lower algorithm.learning_rate"),
    )
