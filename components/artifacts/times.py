"""Timeouts of an artifact store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Timeouts and intervals, in seconds."""

    patience: float = 300.0
    """Time for which a failing operation on a remote store is retried."""
    beat: float = 20.0
    """Interval at which the holder of a remote lock renews it."""
    stale: float = 120.0
    """Age, by the store's own clock, after which a remote lock that is not renewed is taken over."""
    poll: float = 5.0
    """Maximum interval between two checks of a lock that another machine holds."""
