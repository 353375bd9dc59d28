"""Summaries of a filter's metrics as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

_DROPPED = "dropped/"


def reasons(metrics: Mapping[str, float]) -> dict[str, int]:
    """Return the number of dropped episodes by reason, most frequent first."""
    counts = {name.removeprefix(_DROPPED): round(count) for name, count in metrics.items() if name.startswith(_DROPPED)}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def total(filters: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of the counts of several filters, such as those of a round with refills."""
    counts: Counter[str] = Counter()
    for metrics in filters:
        counts.update({name: value for name, value in metrics.items() if name != "kept_share"})
    return dict(counts)


def counted(by_reason: Mapping[str, int]) -> str:
    """Return counts by reason as text, such as `6 no_spread, 2 unscored`."""
    return ", ".join(f"{count} {reason}" for reason, count in by_reason.items())


def summary_text(metrics: Mapping[str, float]) -> str:
    """Return a summary such as `kept 40 of 48 (6 no_spread, 2 unscored)`; empty if the filter has no metrics, as in a
    plan."""
    if "kept" not in metrics:
        return ""
    summary = f"kept {metrics['kept']:.0f} of {metrics['kept'] + metrics.get('dropped', 0):.0f}"
    return f"{summary} ({counts})" if (counts := counted(reasons(metrics))) else summary
