"""How far those who judge the same episodes agree.

With values x_ui of judge i on unit u:

    quadratic-weighted kappa = 1 - Σ_ab w_ab O_ab / Σ_ab w_ab E_ab,  w_ab = (a - b)²      (Cohen, Psych. Bull. 70, 1968)
    Krippendorff's alpha     = 1 - D_o / D_e, with the squared difference        (Content Analysis, 3rd ed., chapter 12)
    Spearman's rho           = Pearson's correlation of the ranks, of equals their mean rank

1 is full agreement, 0 what chance would give. Where all say the same there is nothing to tell apart: then there is no
value (None).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def kappa(one: Sequence[Hashable], other: Sequence[Hashable]) -> float | None:
    """Cohen's kappa of two judges, on categories without order."""
    return _kappa(one, other, lambda a, b: float(a != b))


def weighted_kappa(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Quadratic-weighted kappa of two judges, on numbers."""
    return _kappa(one, other, lambda a, b: (a - b) ** 2)


def _kappa(one, other, weight) -> float | None:  # type: ignore[no-untyped-def]  # of any kind of category
    count = len(one)
    observed = sum(weight(a, b) for a, b in zip(one, other, strict=True))
    ours, theirs = Counter(one), Counter(other)
    expected = sum(n * m * weight(a, b) for a, n in ours.items() for b, m in theirs.items()) / max(count, 1)
    return 1 - observed / expected if expected else None


def alpha(units: Sequence[Sequence[float]]) -> float | None:
    """Krippendorff's alpha, interval scale. units: the values that each episode got; those with one are left out."""
    paired = [list(values) for values in units if len(values) > 1]
    everything = [value for values in paired for value in values]
    total = len(everything)
    if total < 2:
        return None
    observed = sum(_squares(values) / (len(values) - 1) for values in paired) / total
    expected = _squares(everything) / (total * (total - 1))
    return 1 - observed / expected if expected > 0 else None


def _squares(values: Sequence[float]) -> float:
    """Σ over ordered pairs of (a - b)² = 2 (n Σx² - (Σx)²), about the mean."""
    mean = math.fsum(values) / len(values)
    return 2 * len(values) * math.fsum((value - mean) ** 2 for value in values)


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Rank correlation of two judges."""
    ours, theirs = ranks(one), ranks(other)
    mean = (len(ours) + 1) / 2
    spread = math.sqrt(sum((a - mean) ** 2 for a in ours) * sum((b - mean) ** 2 for b in theirs))
    return sum((a - mean) * (b - mean) for a, b in zip(ours, theirs, strict=True)) / spread if spread else None


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; of equals the mean."""
    order = sorted(values)
    first = {value: index for index, value in reversed(list(enumerate(order)))}
    many = Counter(order)
    return [first[value] + (many[value] + 1) / 2 for value in values]


def between(judged: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Figures of several judges, by name: of every two of them `ONE_OTHER/spearman`, `/alpha` and `/episodes`, how many
    both judged; of all together `alpha`. judged: values by judge and episode."""
    found: dict[str, float | None] = {}
    for one, other in combinations(judged, 2):
        both = [episode for episode in judged[one] if episode in judged[other]]
        pairs = [(judged[one][episode], judged[other][episode]) for episode in both]
        found[f"{one}_{other}/episodes"] = float(len(pairs))
        found[f"{one}_{other}/alpha"] = alpha(pairs)
        found[f"{one}_{other}/spearman"] = spearman([a for a, _ in pairs], [b for _, b in pairs])
    everything = {episode: None for values in judged.values() for episode in values}
    found["alpha"] = alpha([[values[one] for values in judged.values() if one in values] for one in everything])
    return {name: value for name, value in found.items() if value is not None}
