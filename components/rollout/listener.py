"""Events of a collection of episodes, for progress and storage."""

from __future__ import annotations

from components.errors import EnvironmentUnavailable
from components.inference.protocol import Engine
from components.trajectories.schema import Trajectory


class EpisodeListener:
    """Receiver of the events of a collection. This one ignores them."""

    def begin(self, name: str, engine: Engine) -> Engine:
        """Receive the start or retry of an episode. Return the engine for it and the episodes derived from it."""
        return engine

    def end(self, trajectory: Trajectory, seconds: float) -> None:
        """Receive a new trajectory and its duration, without the time spent waiting for an environment."""

    def retry(self, error: EnvironmentUnavailable) -> None:
        """Receive the cause of a retry."""
