"""Pairings of the players of a comparison, and their strengths.

Pairings are all pairs, or a few rounds in which each player meets one more opponent.

    random     opponents not met yet, drawn with a seed
    swiss      opponents with a similar score, not met yet: close comparisons are the most informative

With an odd number of players, one sits out each round; in a Swiss round, the last of those who have sat out least.

Strengths are those of Bradley and Terry (1952): P(i beats j) = σ(θ_i - θ_j), with θ the log of the strength. With w_ij
the points of i against j (a tie is half a point for each), and a prior of α ties of each player against an opponent
with θ = 0, the strengths maximise

    L(θ) = Σ_ij w_ij log σ(θ_i - θ_j) + Σ_i α/2 · [log σ(θ_i) + log σ(-θ_i)]

The prior makes L strictly concave. So the maximum is unique, even if a player won all comparisons, or if the pairs do
not connect all players. At the maximum the gradient is zero: each player's points equal its expected points.

    Σ_j w_ij + α/2 = Σ_j (w_ij + w_ji) σ(θ_i - θ_j) + α σ(θ_i)

The solver is Newton's method; each step is halved until L increases. Minorisation-maximisation (Hunter, 2004, The
Annals of Statistics 32, 384-406) converges to the same point, but needs tens of thousands of steps if a player won all
comparisons.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import count

Pair = tuple[int, int]
MOST_TRIES = 2000
"""Maximum number of pairs tried in the search for a complete matching."""


def all_pairs(players: Sequence[int]) -> list[Pair]:
    """Return all pairs of players."""
    return [(player, other) for i, player in enumerate(players) for other in players[i + 1 :]]


def random_rounds(players: Sequence[int], rounds: int, seed: int) -> list[Pair]:
    """Return the pairs of all rounds."""
    generator = random.Random(seed)
    met: set[frozenset[int]] = set()
    for _ in range(rounds):
        order = list(players)
        generator.shuffle(order)
        met |= set(map(frozenset, _pair_neighbours(order, met)))
    return [pair for pair in all_pairs(players) if frozenset(pair) in met]


def swiss_round(players: Sequence[int], points: Sequence[float], met: Collection[frozenset[int]]) -> list[Pair]:
    """Return the pairs of the next round. players: in the order that breaks ties; points: their points so far."""
    games = Counter(player for pair in met for player in pair)
    total = dict(zip(players, points, strict=True))
    order = sorted(players, key=lambda player: -total[player])
    if len(order) % 2:
        most = max(games[player] for player in order)
        order.remove(next(player for player in reversed(order) if games[player] == most))
    return _pair_neighbours(order, met)


def _pair_neighbours(order: Sequence[int], met: Collection[frozenset[int]]) -> list[Pair]:
    """Return pairs of neighbours that have not met; as many pairs as possible, so that a player sits out only if
    necessary."""
    tries = count()
    return _complete_matching(list(order), met, tries) or _greedy_matching(order, met)


def _complete_matching(players: list[int], met: Collection[frozenset[int]], tries: Iterator[int]) -> list[Pair] | None:
    """Return a complete matching, without the last player if the number is odd; None if none was found within the
    limit."""
    if len(players) < 2:
        return []
    player, *others = players
    for other in others:
        if frozenset((player, other)) not in met and next(tries) < MOST_TRIES:
            pairs = _complete_matching([candidate for candidate in others if candidate != other], met, tries)
            if pairs is not None:
                return [(player, other), *pairs]
    return None


def _greedy_matching(order: Sequence[int], met: Collection[frozenset[int]]) -> list[Pair]:
    """Pair each player with the next available one; a player without a partner sits out."""
    players = list(order)
    pairs: list[Pair] = []
    while players:
        current = players.pop(0)
        other = next((player for player in players if frozenset((current, player)) not in met), None)
        if other is not None:
            players.remove(other)
            pairs.append((current, other))
    return pairs


TOLERANCE = 1e-9
"""Convergence threshold: largest absolute entry of the gradient, in points."""
MOST_STEPS = 200


def strengths(points: Sequence[Sequence[float]], prior: float = 0.1) -> list[float]:
    """Return θ (N,). points: (N, N), row i has the points of i against each player. prior: α, more than 0."""
    import numpy as np

    w_NN = np.asarray(points, dtype=np.float64)
    n_NN = w_NN + w_NN.T
    theta_N = np.zeros(len(w_NN))

    def likelihood(theta_N: np.ndarray) -> float:
        against_prior = np.logaddexp(0, -theta_N) + np.logaddexp(0, theta_N)
        return float(-(w_NN * np.logaddexp(0, theta_N - theta_N[:, None])).sum() - prior / 2 * against_prior.sum())

    for _ in range(MOST_STEPS):
        p_NN = 1 / (1 + np.exp(theta_N - theta_N[:, None]))
        q_N = 1 / (1 + np.exp(-theta_N))
        gradient_N = w_NN.sum(1) + prior / 2 - (n_NN * p_NN).sum(1) - prior * q_N
        if np.abs(gradient_N).max(initial=0.0) < TOLERANCE:
            break
        curvature_NN = n_NN * p_NN * (1 - p_NN)
        hessian_NN = np.diag(curvature_NN.sum(1) + prior * q_N * (1 - q_N)) - curvature_NN
        step_N = np.linalg.solve(hessian_NN, gradient_N)
        step_N /= max(1.0, np.abs(step_N).max() / 4)  # limits the step to the region where the quadratic model holds
        before = likelihood(theta_N)
        while np.abs(step_N).max() > 1e-12 and likelihood(theta_N + step_N) < before:
            step_N /= 2
        theta_N = theta_N + step_N
    return [float(theta) for theta in theta_N]


def shares(points: Sequence[Sequence[float]], prior: float = 0.1) -> list[float]:
    """Return for each player the expected share of points in one comparison with each other player (N,): from 0 to 1,
    0.5 on average. N: 2 or more."""
    import numpy as np

    theta_N = np.asarray(strengths(points, prior))
    p_NN = 1 / (1 + np.exp(theta_N - theta_N[:, None]))
    return [float(share) for share in (p_NN.sum(1) - 0.5) / (len(theta_N) - 1)]
