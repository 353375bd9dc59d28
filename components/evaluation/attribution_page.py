"""Lost scenarios of a round and the training groups that pushed against them, as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.evaluation.examples import view
from components.evaluation.page import page
from components.redaction import mask_text
from components.trajectories.schema import Trajectory

MOST_SCENARIOS = 50
"""Maximum number of lost scenarios whose episodes are on the page."""


@dataclass(frozen=True)
class LostOnPage:
    """One lost scenario."""

    row: Mapping[str, Any]
    """Figures of the scenario, as in the JSON output."""
    before: Trajectory
    after: Trajectory
    groups: Mapping[str, Sequence[Trajectory]]
    """Episodes to read of the most negative groups."""


def render(title: str, created: str, data: Mapping[str, Any], lost: Sequence[LostOnPage]) -> str:
    """Return the page as HTML text. data: JSON output."""
    return page(
        "attribution.html.j2",
        title=mask_text(title),
        created=created,
        data=data,
        lost=[
            {
                "row": item.row,
                "sides": [("Solved before the round", view(item.before)), ("Not solved after it", view(item.after))],
                "groups": [
                    {**group, "views": [(episode.advantage, view(episode)) for episode in item.groups[group["group"]]]}
                    for group in item.row["groups"]
                ],
            }
            for item in lost[:MOST_SCENARIOS]
        ],
        more=max(0, len(lost) - MOST_SCENARIOS),
    )
