"""Chain of filters: each one decides about the trajectories that the previous ones kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from components.errors import Problem, SpecError
from components.filters.protocol import AnyFilter, ColumnFilter, decides_per_group
from components.filters.select import as_column_filter
from components.specs import Target
from components.specs.registered import registered
from components.trajectories.reads import NOTHING, Reads

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns
    from components.trajectories.sources import Source

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@registered("filter.chain")
class Chain(ColumnFilter):
    """Filter that keeps the trajectories that all of its filters keep.

    Args:
        filters: Filters by name, in the order in which they are applied. A group with no remaining trajectory is not
            passed on; a filter that surveys the collection surveys the trajectories that remain.

    The reason of a dropped trajectory is NAME/REASON, which distinguishes two filters with the same rule.
    """

    def __init__(self, filters: Annotated[dict[str, Any], Field(min_length=1)]):
        if not isinstance(filters, Mapping) or not filters:
            message = f"{filters!r:.80}: expected a non-empty mapping of names to filters, NAME: {{_target_: ...}}"
            raise SpecError([Problem("filter.filters", message)])
        for name in filters:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                message = f"{name!r} is not a valid filter name; expected letters, digits, _ and - (as in metric names)"
                raise SpecError([Problem("filter.filters", message)])
        self.filters: dict[str, AnyFilter] = dict(filters)

    @property
    def per_group(self) -> bool:
        """True if all of its filters decide about each group by itself."""
        return all(decides_per_group(filter_) for filter_ in self.filters.values())

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for a stage key, as a list of pairs: stage keys ignore the order of a mapping."""
        return {"filters": [[name, filter_] for name, filter_ in arguments["filters"].items()]}

    def prepare(self, source: Source) -> ColumnFilter:
        deciders: dict[str, ColumnFilter] = {}
        for name, filter_ in self.filters.items():
            remaining = _Remaining(source, _Deciders(dict(deciders)))
            deciders[name] = as_column_filter(filter_).prepare(remaining)
        return _Deciders(deciders)


def combines(filter_: Target) -> bool:
    """Return True for a configured chain, or another combination of named filters."""
    kind = filter_.factory()
    return isinstance(kind, type) and issubclass(kind, Chain)


def links(filter_: Target) -> dict[str, Any]:
    """Return the members of a configured combination by the suffix of their key path; of another filter, itself under
    ""."""
    if not combines(filter_) or not isinstance(filter_.arguments.get("filters"), Mapping):
        return {"": filter_}  # what is no mapping is refused where the chain is built
    return {
        f".filters.{name}{end}": link
        for name, member in filter_.arguments["filters"].items()
        for end, link in (links(member).items() if isinstance(member, Target) else [("", member)])
    }


class _Deciders(ColumnFilter):
    def __init__(self, deciders: Mapping[str, ColumnFilter]):
        self._deciders = deciders
        self.reads = NOTHING.union(*(decider.reads for decider in deciders.values()))

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        import numpy as np

        reasons_N = np.full(len(episodes), None, object)
        remaining = np.flatnonzero(episodes.scored_N)
        for name, decider in self._deciders.items():
            if len(remaining):
                reasons = decider.reasons_N(episodes.take(remaining))
                is_dropped = np.not_equal(reasons, None)
                reasons_N[remaining[is_dropped]] = [f"{name}/{reason}" for reason in reasons[is_dropped].tolist()]
                remaining = remaining[~is_dropped]
        return reasons_N


class _Remaining:
    """The collection without the episodes that filters drop, and without groups that become empty."""

    def __init__(self, source: Source, decider: _Deciders):
        self._source = source
        self._decider = decider

    @property
    def whole(self) -> _Remaining:
        return _Remaining(self._source.whole, self._decider)

    def read(self, reads: Reads) -> Iterator[EpisodeColumns]:
        import numpy as np

        for episodes in self._source.read(reads | self._decider.reads):
            kept_N = np.equal(self._decider.reasons_N(episodes), None)
            if kept_N.any():
                yield episodes.take(np.flatnonzero(kept_N))
