"""Machine and hourly price that a provider offers for a place, before a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.compute.place import Place


@dataclass(frozen=True)
class Offer:
    """Machine that a provider would choose for a place."""

    machine: str
    """Cloud, region and type; without an offer, the request."""
    price: float | None
    """US dollars per hour for all nodes; None without an offer."""
    problem: str | None = None
    """Reason why there is no offer; None with one."""


def offers(places: Mapping[str, Place]) -> dict[str, Offer]:
    """Return the offers by name of the place. Each provider is asked once."""
    result: dict[str, Offer] = {}
    for kind in dict.fromkeys(type(place) for place in places.values()):
        result |= kind.offers({name: place for name, place in places.items() if type(place) is kind})
    return result
