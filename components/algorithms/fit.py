"""Validation of trajectories before training: token ids within the vocabulary, length within the model's limit, finite
rewards."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from components.errors import ArtifactError
from components.trajectories.schema import Trajectory

log = logging.getLogger(__name__)

MAX_LISTED = 5
"""Largest number of trajectories that a warning lists."""


def check(trajectories: Sequence[Trajectory], vocabulary: int) -> None:
    """Raise ArtifactError for a token id outside the vocabulary, and for a reward that is not finite."""
    for trajectory in trajectories:
        if trajectory.reward is not None and not math.isfinite(trajectory.reward):
            raise ArtifactError(
                f"trajectory {trajectory.id} has the reward {trajectory.reward}: expected a finite number, or none if "
                "it could not be scored"
            )
        for history in trajectory.histories:
            unknown_id = next((token for token in history.token_ids if not 0 <= token < vocabulary), None)
            if unknown_id is not None:
                raise ArtifactError(
                    f"trajectory {trajectory.id} has the token id {unknown_id}, but the model's ids range from 0 to "
                    f"{vocabulary - 1}: it was sampled from another model. Collect with the model in training"
                )


def drop_too_long(trajectories: Sequence[Trajectory], max_length: int) -> list[Trajectory]:
    """Return the trajectories whose histories all have at most `max_length` tokens. A longer trajectory is left out
    entirely: truncated, it would be credited with an end that it does not contain. A warning counts and lists them."""
    longer = [
        trajectory
        for trajectory in trajectories
        if any(len(history.token_ids) > max_length for history in trajectory.histories)
    ]
    if longer:
        log.warning(
            "episodes left out of training because a history is longer than model.max_length=%d tokens: %d of %d: %s",
            *(max_length, len(longer), len(trajectories)),
            ", ".join(
                [*(trajectory.id for trajectory in longer[:MAX_LISTED]), *(["…"] if len(longer) > MAX_LISTED else [])]
            ),
        )
    long_ids = {trajectory.id for trajectory in longer}
    return [trajectory for trajectory in trajectories if trajectory.id not in long_ids]
