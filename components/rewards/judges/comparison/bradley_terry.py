"""Strengths from comparisons (Bradley and Terry, 1952): P(i beats j) = σ(θ_i - θ_j), with θ = log of the strength.

With w_ij the points of i against j (a tie is half a point for each), and a prior of α ties of each against an opponent
with θ = 0, the strengths maximise

    L(θ) = Σ_ij w_ij log σ(θ_i - θ_j) + Σ_i α/2 · [log σ(θ_i) + log σ(-θ_i)]

The prior makes L strictly concave: there is one maximum, also where somebody has won all, or where the pairs do not
connect everybody. There the gradient is zero, so that each has made as many points as it was to expect:

    Σ_j w_ij + α/2 = Σ_j (w_ij + w_ji) σ(θ_i - θ_j) + α σ(θ_i)

Found by Newton's method, each step halved until L grows. Minorisation-maximisation (Hunter, 2004, The Annals of
Statistics 32, 384-406) comes to the same place, in tens of thousands of steps where somebody has won all.
"""

from __future__ import annotations

from collections.abc import Sequence

TOLERANCE = 1e-9
"""Largest entry of the gradient at which it ends, in points."""
MOST_STEPS = 200


def strengths(points: Sequence[Sequence[float]], prior: float = 0.1) -> list[float]:
    """(N,) θ. points: (N, N), row i has what i made against each. prior: α, more than 0."""
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
        step_N /= max(1.0, np.abs(step_N).max() / 4)  # so far the curvature may be believed
        before = likelihood(theta_N)
        while np.abs(step_N).max() > 1e-12 and likelihood(theta_N + step_N) < before:
            step_N /= 2
        theta_N = theta_N + step_N
    return [float(one) for one in theta_N]


def shares(points: Sequence[Sequence[float]], prior: float = 0.1) -> list[float]:
    """(N,) of each the points that it is to expect of one comparison with each other one, as a share: from 0 to 1, and
    0.5 on average. N: 2 or more."""
    import numpy as np

    theta_N = np.asarray(strengths(points, prior))
    p_NN = 1 / (1 + np.exp(theta_N - theta_N[:, None]))
    return [float(one) for one in (p_NN.sum(1) - 0.5) / (len(theta_N) - 1)]
