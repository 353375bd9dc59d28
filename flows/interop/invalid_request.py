"""Error for a request that an episode cannot accept."""

from __future__ import annotations


class InvalidRequest(ValueError):
    """Request that cannot be executed: a step before the reset or after the end, an unknown scenario, an action that is
    no action. Each protocol reports it in its own terms."""
