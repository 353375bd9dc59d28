"""Losses of whole episodes as in the papers, in plain torch: preferences, supervised fine-tuning, distillation.
Independent of the library.

The log-probability of an episode is the sum over its sampled tokens, in all its histories.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

Pair = tuple[int, int]
"""Indices of the better and of the worse episode."""


def pairs(spec: Any, groups: Sequence[str], rewards: Sequence[float]) -> list[Pair]:
    """Return the pairs of each group: the best and the worst episode, or every two episodes of which one is better."""
    result = []
    for name in dict.fromkeys(groups):
        members = [number for number, group in enumerate(groups) if group == name]
        ranked = sorted(members, key=lambda number: -rewards[number])
        if spec.pairs == "best_worst":
            candidates = [(ranked[0], ranked[-1])]
        else:
            candidates = [(better, worse) for position, better in enumerate(ranked) for worse in ranked[position + 1 :]]
        result += [
            (better, worse) for better, worse in candidates if rewards[better] - rewards[worse] > spec.min_margin
        ]
    return result


def dpo(spec: Any, logprobs: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], index_pairs: Sequence[Pair]):
    """Return the loss of arXiv:2305.18290, eq. 7, with label smoothing its conservative form; and the likelihood term
    of arXiv:2404.19733, eq. 1."""
    losses = []
    for better, worse in index_pairs:
        h = spec.beta * ((logprobs[better] - reference[better]).sum() - (logprobs[worse] - reference[worse]).sum())
        e = spec.label_smoothing
        losses.append(-(1 - e) * torch.log(torch.sigmoid(h)) - e * torch.log(torch.sigmoid(-h)))
    return torch.stack(losses).mean() + _likelihood_term(spec, [logprobs[better] for better, _ in index_pairs])


def ipo(spec: Any, logprobs: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], index_pairs: Sequence[Pair]):
    """Return the loss of arXiv:2310.12036, eq. 17, with log-ratios per token."""
    losses = []
    for better, worse in index_pairs:
        h = (logprobs[better] - reference[better]).mean() - (logprobs[worse] - reference[worse]).mean()
        losses.append((h - 1 / (2 * spec.beta)) ** 2)
    return torch.stack(losses).mean() + _likelihood_term(spec, [logprobs[better] for better, _ in index_pairs])


def _likelihood_term(spec: Any, chosen: Sequence[torch.Tensor]) -> torch.Tensor:
    return -spec.likelihood_weight * torch.stack([logprob.mean() for logprob in chosen]).mean()


def orpo(spec: Any, logprobs: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], index_pairs: Sequence[Pair]):
    """Return the loss of arXiv:2403.07691, eq. 6 and 7; the likelihood is the mean over the tokens of all chosen
    episodes, as in its code."""
    losses = []
    for better, worse in index_pairs:
        p, q = torch.exp(logprobs[better].mean()), torch.exp(logprobs[worse].mean())
        losses.append(-torch.log(torch.sigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q)))))
    likelihood = torch.cat([logprobs[better] for better, _ in index_pairs]).mean()
    return -likelihood + spec.beta * torch.stack(losses).mean()


def kto(
    spec: Any,
    logprobs: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    rewards: Sequence[float],
    reference_point: float,
) -> torch.Tensor:
    """Return the loss of arXiv:2402.01306, eq. 8. reference_point: mean log-ratio of mismatched episodes."""
    z = max(0.0, reference_point)
    losses = []
    for logprob, reference_logprob, reward in zip(logprobs, reference, rewards, strict=True):
        ratio = (logprob - reference_logprob).sum()
        if reward >= spec.threshold:
            likelihood = spec.likelihood_weight * logprob.mean()
            losses.append(spec.good_weight * (1 - torch.sigmoid(spec.beta * (ratio - z))) - likelihood)
        else:
            losses.append(spec.bad_weight * (1 - torch.sigmoid(spec.beta * (z - ratio))))
    return torch.stack(losses).mean()


History = tuple[list[int], list[int]]
"""Token ids, and indices of the sampled tokens."""


def mismatched(history: Sequence[History], other: Sequence[History]) -> list[History]:
    """Return another episode's answers after the prompts of this one, history by history; after the last prompt if the
    other episode has more histories."""
    result = []
    for index, (token_ids, sampled) in enumerate(other):
        prompt_ids, prompt_sampled = history[min(index, len(history) - 1)]
        prompt = prompt_ids[: prompt_sampled[0]]
        start = sampled[0]
        result.append((prompt + token_ids[start:], [position - start + len(prompt) for position in sampled]))
    return result


def sft(logprobs: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the mean negative log-likelihood of the tokens (arXiv:2203.02155), each weighted by its episode's
    weight."""
    tokens = sum(len(logprob) for logprob in logprobs)
    return -sum(weight * logprob.sum() for logprob, weight in zip(logprobs, weights, strict=True)) / tokens


def softmax_weights(rewards: Sequence[float], temperature: float | None) -> list[float]:
    """Return softmax(reward / temperature), scaled to a mean of 1."""
    if temperature is None:
        return [1.0] * len(rewards)
    powers = [math.exp(reward / temperature) for reward in rewards]
    return [len(powers) * power / sum(powers) for power in powers]


def reverse_kl(student_SV: torch.Tensor, teacher_SV: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens of KL(student || teacher) from log-probabilities (arXiv:2306.13649; arXiv:2306.08543,
    eq. 1)."""
    return (student_SV.exp() * (student_SV - teacher_SV)).sum(-1).mean()
