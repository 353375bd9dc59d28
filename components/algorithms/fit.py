"""Whether trajectories fit what is trained on them: their tokens the vocabulary, their length the model, their rewards
the arithmetic."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from components.errors import ArtifactError
from components.trajectories.schema import Trajectory

log = logging.getLogger(__name__)

NAMED = 5
"""Trajectories that a warning names."""


def check(trajectories: Sequence[Trajectory], vocabulary: int) -> None:
    """Raises ArtifactError for a token id that the model does not have, and for a reward that is no finite number."""
    for one in trajectories:
        if one.reward is not None and not math.isfinite(one.reward):
            raise ArtifactError(
                f"trajectory {one.id} has the reward {one.reward}: expected a finite number, or none where it could "
                "not be scored"
            )
        for history in one.histories:
            strange = next((token for token in history.token_ids if not 0 <= token < vocabulary), None)
            if strange is not None:
                raise ArtifactError(
                    f"trajectory {one.id} has the token id {strange}, and the model has ids from 0 to "
                    f"{vocabulary - 1}: it was played by another model. Collect with the model that is trained"
                )


def short_enough(trajectories: Sequence[Trajectory], max_length: int) -> list[Trajectory]:
    """Those of which no history is longer than `max_length` tokens. A longer one is left out whole: cut off, it would
    be credited with an end that it does not show. The log counts and names them."""
    longer = [one for one in trajectories if any(len(history.token_ids) > max_length for history in one.histories)]
    if longer:
        log.warning(
            "episodes left out of training, for a history is longer than model.max_length=%d tokens: %d of %d: %s",
            *(max_length, len(longer), len(trajectories)),
            ", ".join([*(one.id for one in longer[:NAMED]), *(["…"] if len(longer) > NAMED else [])]),
        )
    gone = {one.id for one in longer}
    return [one for one in trajectories if one.id not in gone]
