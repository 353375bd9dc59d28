"""Filter by a property of the scenario: its type or its difficulty.

Both are columns of the scenarios, which the environment sets; an evaluation's summary divides success by them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StrictInt, StrictStr

from components.errors import Problem, SpecError
from components.filters.protocol import ColumnFilter
from components.specs.base import nearest
from components.specs.registered import registered
from components.trajectories.reads import SCENARIO

if TYPE_CHECKING:
    from components.trajectories.columns import Array, EpisodeColumns
    from components.trajectories.sources import Source

logger = logging.getLogger(__name__)

By = Literal["type", "difficulty"]
Values = Annotated[list[StrictStr | StrictInt], Field(min_length=1)]
LISTED = 10
"""Maximum number of existing values in a message."""


@registered("filter.among")
class Among(ColumnFilter):
    """Filter that keeps, or drops, the episodes of scenarios with one of some types, or difficulties.

    Args:
        by: Property of the scenario: `type` (a text) or `difficulty` (a whole number).
        keep: Values that are kept; null: all that `drop` does not name.
        drop: Values that are dropped; null: all that `keep` does not name.

    The reason is other_type or other_difficulty. A value in `keep` that no episode of the collection has is reported by
    a warning that lists those that exist.
    """

    per_group = True
    reads = frozenset({SCENARIO})

    def __init__(self, by: By, keep: Values | None = None, drop: Values | None = None):
        if (keep is None) == (drop is None):
            message = (
                f"keep and drop are both {'null, so the filter drops no episode' if keep is None else 'set'}; "
                f"expected one of them, such as filter.keep={'[refund]' if by == 'type' else '[1,2]'}"
            )
            raise SpecError([Problem("filter.keep", message)])
        self.by: By = by
        self.key: Literal["keep", "drop"] = "drop" if keep is None else "keep"
        self.values: Sequence[str | int] = (keep if keep is not None else drop) or ()
        expected = str if by == "type" else int
        if invalid := [value for value in self.values if not isinstance(value, expected)]:
            kind = "a text (in quotes, if it looks like a number)" if by == "type" else "a whole number"
            message = f"{invalid[0]!r} is no {by} of a scenario; expected {kind}"
            raise SpecError([Problem(f"filter.{self.key}", message)])

    def prepare(self, source: Source) -> ColumnFilter:
        """Warn about values to keep that no episode of the collection has, reading no further than needed to see them
        all. Values to drop may be missing from a small collection."""
        if self.key == "drop":
            return self
        available: set[str | int] = set()
        for episodes in source.whole.read(self.reads):
            available |= set(episodes.scenario_values(self.by))
            if available.issuperset(self.values):
                return self
        if available:
            for problem in self.problems(available, "episode of the collection"):
                logger.warning("%s", problem)
        return self

    def problems(self, available: Iterable[str | int], where: str) -> list[Problem]:
        """Return a problem for each value that is not available. where: kind of row that was searched."""
        existing = sorted(set(available))
        names = ", ".join(map(str, existing[:LISTED])) + (", …" if len(existing) > LISTED else "")
        kinds = "types" if self.by == "type" else "difficulties"
        if self.key == "drop" and set(existing) <= set(self.values):
            return [Problem("filter.drop", f"drops all {kinds} that exist, so nothing is kept: {names}")]
        return [
            Problem(
                f"filter.{self.key}",
                f"{value!r}: no {where} has this {self.by}; {kinds} that exist: {names}",
                nearest(str(value), [str(name) for name in existing]) if self.by == "type" else None,
            )
            for value in self.values
            if value not in existing
        ]

    def rule_N(self, episodes: EpisodeColumns) -> Array:
        from components.filters.reasons import dropped

        listed_N = episodes.with_scenario_N(self.by, self.values)
        return dropped(listed_N if self.key == "drop" else ~listed_N, f"other_{self.by}")
