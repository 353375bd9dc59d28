"""Classes of unsuccessful episodes: failures by boundary and kind, and wrong results by the way in which they ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from components.trajectories.stored import ScoredEpisodes
from components.trajectories.truncation import CALLS, CONTEXT, TURNS

UNREADABLE = "no readable action"
"""No message of the episode could be parsed into an action."""
TRUNCATED = {CONTEXT: "out of context", TURNS: "out of turns", CALLS: "out of calls"}
"""A limit ended the episode."""
CUT_OFF = "message cut off"
"""The last message reached the token limit."""
WRONG = "wrong result"
"""The episode ended by itself, without success."""


@dataclass(frozen=True)
class ErrorClass:
    """Unsuccessful episodes of one kind."""

    name: str
    """One of the names above, or `BOUNDARY: KIND` of a failure."""
    places: Sequence[int]
    """Positions of the episodes of the class, in their order."""


def error_classes(episodes: ScoredEpisodes) -> list[ErrorClass]:
    """Return the classes of the unsuccessful episodes, the largest first."""
    columns, failures = episodes.columns, episodes.failures()
    turns_N, invalid_N = columns.metric_N("turns"), columns.metric_N("parse_errors")
    limits = [(columns.metric_N(metric), name) for metric, name in TRUNCATED.items()]
    unsolved = (~columns.success_N).nonzero()[0].tolist()
    ids, endings = columns.names, episodes.finish_reasons() if unsolved else []
    classes: dict[str, list[int]] = {}
    for place in unsolved:
        turns, failure = turns_N[place], failures.get(ids[place])
        if failure is not None:
            name = f"{failure.boundary}: {failure.kind}"
        elif turns and invalid_N[place] == turns:
            name = UNREADABLE
        else:
            limit = next((name for metric_N, name in limits if metric_N[place] > 0), None)
            name = limit or (CUT_OFF if endings[place] == "length" else WRONG)
        classes.setdefault(name, []).append(place)
    return [ErrorClass(name, classes[name]) for name in sorted(classes, key=lambda name: (-len(classes[name]), name))]
