"""Files of the scores that were given while a collection was played (`judge.ahead`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from components.json_text import read_json
from components.trajectories.schema import Score

SCORES, REWARD = FILES = ("ahead.parquet", "ahead.json")
"""Files of a collection: scores, and the digest of the reward that gave them."""


def read_ahead(folder: Path, digest: str) -> dict[str, Score]:
    """Return the scores in the folder of a collection by trajectory id; none if a reward with another digest gave
    them."""
    from components.trajectories.store import read_scores

    if not (folder / REWARD).is_file() or read_json(folder / REWARD) != {"reward": digest}:
        return {}
    return {score.trajectory_id: score for score in read_scores(folder / SCORES)}


def write_ahead(folder: Path, scores: Iterable[Score], digest: str) -> None:
    """Write scores into the folder of a collection. digest: of the reward."""
    from components.trajectories.store import write_scores

    write_scores(folder / SCORES, scores)
    (folder / REWARD).write_text(json.dumps({"reward": digest}) + "\n", encoding="utf-8")
