"""Names of the columns that a reader of episodes asks for."""

from __future__ import annotations

Reads = frozenset[str]
"""Columns that are read next to the id, the group, the reward and the failure of each episode."""

OUTCOME = "outcome"
"""Final report of the environment."""
METRICS = "metrics"
"""Metrics of the episode."""
COMPONENTS = "components"
"""Components of the score."""
SCENARIO = "scenario"
"""Type and difficulty of the scenario."""
WHOLE = "whole"
"""Whole trajectories."""

NOTHING: Reads = frozenset()
NUMBERS: Reads = frozenset({OUTCOME, METRICS, COMPONENTS})
"""Columns of the numbers that have a name."""
MEASURES: Reads = frozenset({OUTCOME, METRICS, SCENARIO})
"""Columns of an evaluation's metrics."""

COLUMNS = {
    "": ("id", "scenario.id", "failure.boundary"),
    OUTCOME: ("outcome",),
    METRICS: ("metrics",),
    COMPONENTS: (),
    SCENARIO: ("scenario.type", "scenario.difficulty"),
}
"""Columns of the trajectories' file by name; "": those that are always read."""
