"""Annotations of the numbers of scenarios that an environment makes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_SCENARIOS = 1_000_000
"""Most scenarios of a split; all of them are in memory at once."""
Count = Annotated[int, Field(ge=1, le=MOST_SCENARIOS)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST_SCENARIOS)]
"""With 0 the split is empty: enough where nothing is trained."""
