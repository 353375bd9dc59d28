"""Union of filters: it keeps the trajectories that at least one of them keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from components.filters.chain import Chain
from components.filters.protocol import ColumnFilter
from components.filters.select import as_column_filter
from components.specs.registered import registered
from components.trajectories.reads import NOTHING

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns
    from components.trajectories.sources import Source


@registered("filter.any_of")
class AnyOf(Chain):
    """Filter that keeps the trajectories that at least one of its filters keeps. Each decides about the whole
    collection.

    Args:
        filters: Filters by name. The reason of a dropped trajectory is that of the first, as NAME/REASON.
    """

    def prepare(self, source: Source) -> ColumnFilter:
        return _Union({name: as_column_filter(filter_).prepare(source) for name, filter_ in self.filters.items()})


class _Union(ColumnFilter):
    def __init__(self, deciders: Mapping[str, ColumnFilter]):
        self._deciders = deciders
        self.reads = NOTHING.union(*(decider.reads for decider in deciders.values()))

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        import numpy as np

        first, *_ = self._deciders
        reasons = [decider.reasons_N(episodes) for decider in self._deciders.values()]
        dropped_N = np.logical_and.reduce([np.not_equal(reasons_N, None) for reasons_N in reasons])
        reasons_N = np.full(len(episodes), None, object)
        reasons_N[dropped_N] = [f"{first}/{reason}" for reason in reasons[0][dropped_N].tolist()]
        return reasons_N
