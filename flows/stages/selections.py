"""What a filter has left, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

_DROPPED = "dropped/"


def reasons(metrics: Mapping[str, float]) -> dict[str, int]:
    """How many episodes a filter with these metrics dropped by reason, the most first."""
    found = {name.removeprefix(_DROPPED): round(count) for name, count in metrics.items() if name.startswith(_DROPPED)}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def total(filters: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of the metrics of several filters, such as those of a round with further collections: sums of the counts."""
    found: Counter[str] = Counter()
    for metrics in filters:
        found.update({name: value for name, value in metrics.items() if name != "kept_share"})
    return dict(found)


def counted(by_reason: Mapping[str, int]) -> str:
    """`6 no_spread, 2 unscored`."""
    return ", ".join(f"{count} {reason}" for reason, count in by_reason.items())


def told(metrics: Mapping[str, float]) -> str:
    """`kept 40 of 48 (6 no_spread, 2 unscored)`; empty where a filter has no figures, as in a plan."""
    if "kept" not in metrics:
        return ""
    kept = f"kept {metrics['kept']:.0f} of {metrics['kept'] + metrics.get('dropped', 0):.0f}"
    return f"{kept} ({text})" if (text := counted(reasons(metrics))) else kept
