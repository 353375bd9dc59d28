"""Formulas of the algorithms as in the papers, in plain torch, independent of the library.

`spec` is any object with the keys of conf/algorithm/*.yaml. An episode has n sampled tokens, over all its turns and
histories in their order; columns have one entry per sampled token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

EPSILON = 1e-6

ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.exp(d) - d - 1,
}
"""Estimates of KL(policy || reference) from d = log(reference / policy) (Schulman, 2020)."""


@dataclass
class Episode:
    """Properties of an episode besides its tokens."""

    group: str
    reward: float
    step_rewards: list[float]
    """Step reward of each turn."""
    states: list[str]
    """State in which each turn was taken."""
    turn: list[int]
    """Index of the turn that each sampled token belongs to."""
    history: list[int]
    """Index of the history that each sampled token belongs to."""
    cut_off: bool = False

    @property
    def tokens(self) -> int:
        return len(self.turn)


@dataclass
class Columns:
    """Log-probabilities of the sampled tokens of an episode, (n,) each."""

    now: torch.Tensor
    """Log-probabilities under the policy in training, with gradient."""
    old: torch.Tensor
    """Log-probabilities under the policy before the first gradient step."""
    sampler: torch.Tensor
    """Log-probabilities of the engine."""
    reference: torch.Tensor
    entropy: torch.Tensor
    """Entropies of the distributions that the tokens were sampled from, with gradient."""


# --- advantages -----------------------------------------------------------------------------------------------------


def overlong(spec: Any, tokens: int) -> float:
    """Return the soft length penalty (DAPO, arXiv:2503.14476, eq. 13), as a part of the reward."""
    if not spec.overlong or tokens <= spec.overlong - spec.overlong_buffer:
        return 0.0
    late = tokens - (spec.overlong - spec.overlong_buffer)
    return -spec.overlong_penalty * (min(1.0, late / spec.overlong_buffer) if spec.overlong_buffer else 1.0)


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    return [sum(discount ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


Value = tuple[int, Hashable, float]
"""Number of the episode, cell that the value is compared within, value."""


def normalised(spec: Any, episodes: Sequence[Episode], values: Sequence[Value]) -> list[float]:
    """Return each value minus its baseline, divided by its scale; both are computed from the values of the same
    cell."""
    result = []
    for number, cell, value in values:
        batch = [v for n, c, v in values if c == cell]
        group = [v for n, c, v in values if c == cell and episodes[n].group == episodes[number].group]
        others = [v for n, c, v in values if c == cell and episodes[n].group == episodes[number].group and n != number]
        baseline = {
            "group": lambda group=group: statistics.fmean(group),
            "leave_one_out": lambda others=others, value=value: statistics.fmean(others) if others else value,
            "batch": lambda batch=batch: statistics.fmean(batch),
            "none": lambda: 0.0,
        }[spec.baseline]()
        spread = {"group": group, "batch": batch, "none": [0.0]}[spec.scale]
        deviation = statistics.pstdev(spread)
        result.append((value - baseline) / (deviation + EPSILON if deviation else 1.0))
    return result


def advantages(spec: Any, episodes: Sequence[Episode], kl: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the advantage of each sampled token of each episode. kl: estimates per token of the KL divergence of the
    policy before the first step from the reference."""
    coefficient = spec.kl_coefficient
    off_reward = [coefficient * sum(episode_kl) if spec.kl_in == "reward" else 0.0 for episode_kl in kl]
    by_token = bool(coefficient) and spec.kl_in == "token_rewards"
    remaining_kl = [
        [coefficient * sum(episode_kl[t:]) if by_token else 0.0 for t in range(len(episode_kl))] for episode_kl in kl
    ]
    numbers = range(len(episodes))
    if spec.credit == "episode":
        # GRPO (arXiv:2402.03300, section 4.1.2), RLOO (arXiv:2402.14740, eq. 7), REINFORCE++ (arXiv:2501.03262, eq. 5).
        returns = [
            episode.reward + overlong(spec, episode.tokens) - off_reward[n] for n, episode in enumerate(episodes)
        ]
        if by_token:
            return _of_tokens(
                spec,
                episodes,
                [[returns[n] - remaining for remaining in remaining_kl[n]] for n in numbers],
                lambda n, t: None,
            )
        episode_advantages = normalised(spec, episodes, [(n, None, returns[n]) for n in numbers])
        return [[episode_advantages[n]] * episodes[n].tokens for n in numbers]
    # The length penalty is part of the reward of the last turn.
    rewards = [
        [*episode.step_rewards[:-1], episode.step_rewards[-1] + overlong(spec, episode.tokens)] for episode in episodes
    ]
    if spec.turn_baseline == "process":
        # arXiv:2402.03300, section 4.1.3.
        steps = normalised(spec, episodes, [(n, None, reward) for n in numbers for reward in rewards[n]])
        advantage_iterator = iter(steps)
        by_turn = [returns_to_go([next(advantage_iterator) for _ in rewards[n]], spec.discount) for n in numbers]
        return _spread(episodes, by_turn)
    returns_by_turn = [[value - off_reward[n] for value in returns_to_go(rewards[n], spec.discount)] for n in numbers]
    if by_token:
        token_returns = [
            [
                returns_by_turn[n][turn] - remaining
                for turn, remaining in zip(episodes[n].turn, remaining_kl[n], strict=True)
            ]
            for n in numbers
        ]
        return _of_tokens(spec, episodes, token_returns, lambda n, t: episodes[n].turn[t])
    cell = {"index": lambda n, turn: turn, "state": lambda n, turn: episodes[n].states[turn]}[spec.turn_baseline]
    values = [(n, cell(n, turn), value) for n in numbers for turn, value in enumerate(returns_by_turn[n])]
    advantage_iterator = iter(normalised(spec, episodes, values))
    by_turn = [[next(advantage_iterator) for _ in rewards[n]] for n in numbers]
    if spec.turn_baseline == "state":
        # GiGPO (arXiv:2505.10978): the episode's total return is undiscounted (eq. 3), step returns are not (eq. 5).
        totals = [(n, None, sum(rewards[n]) - off_reward[n]) for n in numbers]
        episode_advantages = normalised(spec, episodes, totals)
        by_turn = [[episode_advantages[n] + spec.state_weight * value for value in by_turn[n]] for n in numbers]
    return _spread(episodes, by_turn)


def _of_tokens(
    spec: Any, episodes: Sequence[Episode], returns: list[list[float]], cell: Callable[[int, int], Hashable]
) -> list[list[float]]:
    """Return the advantages of tokens from their returns. A token that is compared with no token of another episode has
    none."""
    values = [
        (n, cell(n, t), value) for n, episode_returns in enumerate(returns) for t, value in enumerate(episode_returns)
    ]
    result = []
    for (number, cell_, value), normal in zip(values, normalised(spec, episodes, values), strict=True):
        same_group = spec.baseline in ("group", "leave_one_out")
        compared = {
            n for n, c, _ in values if c == cell_ and (not same_group or episodes[n].group == episodes[number].group)
        }
        default = value if spec.baseline == "none" else 0.0
        result.append(normal if len(compared) > 1 else default)
    result_iterator = iter(result)
    return [[next(result_iterator) for _ in episode_returns] for episode_returns in returns]


def _spread(episodes: Sequence[Episode], by_turn: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[values[turn] for turn in episode.turn] for episode, values in zip(episodes, by_turn, strict=True)]


# --- the loss of the policy -----------------------------------------------------------------------------------------


def surrogate(spec: Any, ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Return PPO's negated clipped objective (arXiv:1707.06347, eq. 7) with a dual clip (arXiv:1912.09729, eq. 5)."""
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantage)
    if spec.dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, spec.dual_clip * advantage), objective)
    return -objective


def ratio_base(spec: Any, columns: Columns) -> torch.Tensor:
    """Return the denominator of the ratios: the sampler, or the policy before the first step if a correction accounts
    for the difference (arXiv:2110.00641), and for sequence ratios."""
    return columns.old if spec.correction in ("truncate", "mask") or spec.ratio != "token" else columns.sampler


def episode_loss(spec: Any, episode: Episode, columns: Columns, advantage: Sequence[float]) -> torch.Tensor:
    """Return the sum over the tokens of an episode, whose gradient equals that of the paper's objective."""
    total = torch.zeros((), dtype=torch.float64)
    for positions in histories(episode):
        logprob_S = columns.now[positions]
        log_ratio = logprob_S - ratio_base(spec, columns)[positions]
        advantage_S = torch.tensor([advantage[position] for position in positions], dtype=torch.float64)
        level = {"token": log_ratio, "sequence_mean": log_ratio.mean(), "sequence": log_ratio.sum()}[spec.ratio]
        same_advantage = bool((advantage_S == advantage_S[0]).all()) and (
            spec.correction in ("auto", "none") or spec.correction_level == "sequence"
        )
        if spec.objective == "cispo":
            # arXiv:2506.13585, eq. 4.
            weight = torch.exp(level).detach().clamp(1 - spec.clip_low, 1 + spec.clip_high)
            loss = -weight * advantage_S * logprob_S
        elif spec.ratio == "token":
            loss = surrogate(spec, torch.exp(log_ratio), advantage_S)
        elif same_advantage:
            # The sequence has one advantage and one weight, so the objective of GSPO (arXiv:2507.18071, eq. 5 and 7)
            # and RLOO applies unchanged. In a mean each token counts once; a product counts once for each token of
            # the episode.
            count = len(positions) if spec.ratio == "sequence_mean" else episode.tokens
            loss = count * surrogate(spec, torch.exp(level), advantage_S[0])[None]
        else:
            # GSPO-token (arXiv:2507.18071, section 4.3): sg(s) · π / sg(π).
            times = 1 if spec.ratio == "sequence_mean" else episode.tokens
            loss = surrogate(
                spec, torch.exp(level.detach()) * torch.exp(times * (logprob_S - logprob_S.detach())), advantage_S
            )
        total = total + (loss * _correction(spec, columns, positions)).sum()
    return total


def histories(episode: Episode) -> Iterable[list[int]]:
    """Yield the positions of the sampled tokens of each history."""
    for _, positions in groupby(range(episode.tokens), key=lambda position: episode.history[position]):
        yield list(positions)


def _correction(spec: Any, columns: Columns, positions: list[int]) -> torch.Tensor | float:
    if spec.correction in ("auto", "none"):
        return 1.0
    log_ratio = (columns.old - columns.sampler)[positions]
    weight = torch.exp(log_ratio if spec.correction_level == "token" else log_ratio.sum().expand(len(positions)))
    if spec.correction == "truncate":
        weight = weight.clamp(max=spec.correction_limit)
    else:
        inside = (weight >= 1 / spec.correction_limit) & (weight <= spec.correction_limit)
        weight = weight * inside
    # The unchanged objective of a sequence has one entry.
    return weight if spec.correction_level == "token" else weight[:1]


def weight(spec: Any, learned: Sequence[Episode], episode: Episode) -> float:
    """Return the weight of each token of an episode."""
    return {
        "tokens": 1 / sum(episode.tokens for episode in learned),
        "sequences": 1 / (episode.tokens * len(learned)),
        "constant": 1 / (spec.constant_length * len(learned)),
    }[spec.normalization]


def policy_gradient(spec: Any, episodes: Sequence[Episode], columns: Sequence[Columns]) -> torch.Tensor:
    """Return a loss whose gradient is that of a gradient step."""
    estimate = ESTIMATORS[spec.kl_estimator]
    kl = [estimate(column.reference - column.old).tolist() for column in columns]
    given_advantages = advantages(spec, episodes, kl)
    learned = [episode for episode in episodes if not (spec.mask_truncated and episode.cut_off)]
    tokens = sum(episode.tokens for episode in learned)
    total = torch.zeros((), dtype=torch.float64)
    for episode, episode_columns, advantage in zip(episodes, columns, given_advantages, strict=True):
        if spec.mask_truncated and episode.cut_off:
            continue
        loss = episode_loss(spec, episode, episode_columns, advantage)
        if spec.kl_in == "loss":
            loss = loss + spec.kl_coefficient * estimate(episode_columns.reference - episode_columns.now).sum()
        total = total + weight(spec, learned, episode) * loss
        total = total - spec.entropy_coefficient * episode_columns.entropy.sum() / tokens
    return total
