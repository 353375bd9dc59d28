"""Classes of unsuccessful episodes: failures by boundary and kind, and wrong results by the way in which they ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from components.trajectories.stored import ScoredEpisodes

UNREADABLE = "no readable action"
"""No message of the episode could be parsed into an action."""
OUT_OF_TURNS = "out of turns"
"""The episode used all its turns."""
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


def error_classes(episodes: ScoredEpisodes, max_turns: int) -> list[ErrorClass]:
    """Return the classes of the unsuccessful episodes, the largest first. max_turns: turn limit of an episode."""
    columns, failures = episodes.columns, episodes.failures()
    turns_N, invalid_N = columns.metric_N("turns"), columns.metric_N("parse_errors")
    unsolved = (~columns.success_N).nonzero()[0].tolist()
    ids, endings = columns.names, episodes.finish_reasons() if unsolved else []
    classes: dict[str, list[int]] = {}
    for place in unsolved:
        turns, failure = turns_N[place], failures.get(ids[place])
        if failure is not None:
            name = f"{failure.boundary}: {failure.kind}"
        elif turns and invalid_N[place] == turns:
            name = UNREADABLE
        elif turns >= max_turns:
            name = OUT_OF_TURNS
        else:
            name = CUT_OFF if endings[place] == "length" else WRONG
        classes.setdefault(name, []).append(place)
    return [ErrorClass(name, classes[name]) for name in sorted(classes, key=lambda name: (-len(classes[name]), name))]
