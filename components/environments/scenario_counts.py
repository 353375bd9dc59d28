"""Number of scenarios that an environment generates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

MOST_SCENARIOS = 1_000_000
"""Maximum number of scenarios of a split; all of them are in memory at once."""
Count = Annotated[int, Field(ge=1, le=MOST_SCENARIOS)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST_SCENARIOS)]
"""0 leaves the split empty, for example if nothing is trained."""


def scenario_numbers(counts: Mapping[str, int], split: str) -> range:
    """Return the numbers of the scenarios of a split; those of `heldout` come first, so they do not depend on the size
    of `train`."""
    first = {"heldout": 0, "train": counts["heldout"]}.get(split, 0)
    return range(first, first + counts.get(split, 0))
