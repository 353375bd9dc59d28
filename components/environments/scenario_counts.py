"""Annotations for the number of scenarios that an environment generates."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_SCENARIOS = 1_000_000
"""Maximum number of scenarios of a split; all of them are in memory at once."""
Count = Annotated[int, Field(ge=1, le=MOST_SCENARIOS)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST_SCENARIOS)]
"""0 leaves the split empty, for example if nothing is trained."""
