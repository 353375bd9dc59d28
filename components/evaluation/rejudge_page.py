"""Comparison of rewards on the same episodes, as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.evaluation.examples import view
from components.evaluation.page import page
from components.evaluation.rank_agreement import FlippedGroup
from components.redaction import mask_text
from components.trajectories.schema import Trajectory

MOST_GROUPS = 20
"""Maximum number of flipped groups of a pair on the page."""
MOST_EPISODES = 4
"""Maximum number of episodes of a group on the page."""


@dataclass(frozen=True)
class PairOnPage:
    """Two rewards compared."""

    row: Mapping[str, Any]
    """Figures of the pair, as in the JSON output."""
    flips: Sequence[FlippedGroup]


def render(
    title: str,
    training: str,
    created: str,
    rewards: Sequence[Mapping[str, Any]],
    pairs: Sequence[PairOnPage],
    episodes: Mapping[str, Trajectory],
    control: Mapping[str, Any] | None = None,
) -> str:
    """Return the page as HTML text. training: gradient steps that the policies took. rewards: rows of the
    JSON output. episodes: by id. control: effect of another order of the groups."""
    return page(
        "rejudge.html.j2",
        title=mask_text(title),
        training=training,
        control=control,
        created=created,
        rewards=rewards,
        pairs=[
            {
                "row": pair.row,
                "flips": [_group(flip, episodes) for flip in pair.flips[:MOST_GROUPS]],
                "more": max(0, len(pair.flips) - MOST_GROUPS),
            }
            for pair in pairs
        ],
    )


def _group(flip: FlippedGroup, episodes: Mapping[str, Trajectory]) -> dict[str, Any]:
    return {
        "name": flip.group,
        "episodes": [
            {"view": view(episodes[name]), "first": flip.first[name], "second": flip.second[name]}
            for name in flip.episodes[:MOST_EPISODES]
        ],
    }
