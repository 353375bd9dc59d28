"""Inter-rater agreement on the same episodes.

With values x_ui of judge i on unit u:

    quadratic-weighted kappa = 1 - Σ_ab w_ab O_ab / Σ_ab w_ab E_ab,  w_ab = (a - b)²      (Cohen, Psych. Bull. 70, 1968)
    Krippendorff's alpha     = 1 - D_o / D_e, with the squared difference        (Content Analysis, 3rd ed., chapter 12)
    Spearman's rho           = Pearson's correlation of the ranks; ties get their mean rank

1 is full agreement, 0 is agreement by chance. If all values are equal, the coefficient is undefined (None).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """Return Cohen's kappa of two judges, for unordered categories."""
    return _kappa(first, second, lambda a, b: float(a != b))


def weighted_kappa(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the quadratic-weighted kappa of two judges, for numbers."""
    return _kappa(first, second, lambda a, b: (a - b) ** 2)


def _kappa(first, second, weight) -> float | None:  # type: ignore[no-untyped-def]  # any category type
    count = len(first)
    observed = sum(weight(a, b) for a, b in zip(first, second, strict=True))
    counts_a, counts_b = Counter(first), Counter(second)
    expected = sum(n * m * weight(a, b) for a, n in counts_a.items() for b, m in counts_b.items()) / max(count, 1)
    return 1 - observed / expected if expected else None


def alpha(units: Sequence[Sequence[float]]) -> float | None:
    """Return Krippendorff's alpha on the interval scale. units: the values that each episode received; units with a
    single value are left out."""
    paired = [list(values) for values in units if len(values) > 1]
    all_values = [value for values in paired for value in values]
    total = len(all_values)
    if total < 2:
        return None
    observed = sum(_squares(values) / (len(values) - 1) for values in paired) / total
    expected = _squares(all_values) / (total * (total - 1))
    return 1 - observed / expected if expected > 0 else None


def _squares(values: Sequence[float]) -> float:
    """Return Σ over ordered pairs of (a - b)² = 2 (n Σx² - (Σx)²), computed about the mean."""
    mean = math.fsum(values) / len(values)
    return 2 * len(values) * math.fsum((value - mean) ** 2 for value in values)


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation of two judges."""
    ranks_a, ranks_b = ranks(first), ranks(second)
    mean = (len(ranks_a) + 1) / 2
    spread = math.sqrt(sum((a - mean) ** 2 for a in ranks_a) * sum((b - mean) ** 2 for b in ranks_b))
    return sum((a - mean) * (b - mean) for a, b in zip(ranks_a, ranks_b, strict=True)) / spread if spread else None


def ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks, from 1; ties get their mean rank."""
    order = sorted(values)
    first = {value: index for index, value in reversed(list(enumerate(order)))}
    counts = Counter(order)
    return [first[value] + (counts[value] + 1) / 2 for value in values]


def between(judged: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return agreement metrics of several judges, by name: for each pair `ONE_OTHER/spearman`, `ONE_OTHER/alpha` and
    `ONE_OTHER/episodes`, the number of episodes that both judged; for all together `alpha`. judged: values by judge and
    episode."""
    metrics: dict[str, float | None] = {}
    for first, second in combinations(judged, 2):
        common_episodes = [episode for episode in judged[first] if episode in judged[second]]
        pairs = [(judged[first][episode], judged[second][episode]) for episode in common_episodes]
        metrics[f"{first}_{second}/episodes"] = float(len(pairs))
        metrics[f"{first}_{second}/alpha"] = alpha(pairs)
        metrics[f"{first}_{second}/spearman"] = spearman([a for a, _ in pairs], [b for _, b in pairs])
    all_episodes = {episode: None for values in judged.values() for episode in values}
    metrics["alpha"] = alpha(
        [[values[episode] for values in judged.values() if episode in values] for episode in all_episodes]
    )
    return {name: value for name, value in metrics.items() if value is not None}
