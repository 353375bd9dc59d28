"""How long a store waits for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds, each."""

    patience: float = 300.0
    """For how long an operation on a remote store that fails is tried again."""
    beat: float = 20.0
    """Between two signs of life of who holds a lock in a remote store."""
    stale: float = 120.0
    """After which a lock without a sign of life, by the store's own clock, is taken over."""
    poll: float = 5.0
    """At most, between two looks at a lock that another machine holds."""
