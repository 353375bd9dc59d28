"""Components that accept any argument, so that a secret can be planted anywhere below them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

from components.environments.protocol import Messages
from components.environments.worlds.shop import Shop
from components.specs.marks import REFERENCE
from components.trajectories.schema import Scenario

logger = logging.getLogger(__name__)


class Holder:
    def __init__(self, settings: Annotated[Any, REFERENCE] = None, name: Annotated[str, REFERENCE] = ""):
        self.settings = settings
        self.name = name


class Undeclared:
    def __init__(self, value: Any = None):
        self.value = value


class Free:
    def __init__(self, **values: Any):
        self.values = values


class World(Shop):
    """The shop with settings. With `note`, it writes the key that it was given there, logs it and says it in the error
    of one episode, as careless code does."""

    def __init__(
        self,
        seed: int = 0,
        train: int = 512,
        heldout: int = 128,
        settings: Annotated[Any, REFERENCE] = None,
    ):
        super().__init__(seed, train, heldout)
        self.settings = settings
        self.note = Path(settings["note"]) if isinstance(settings, dict) and "note" in settings else None
        self.refuses = {scenario.id for scenario in self.scenarios("heldout")[:1]}

    def reset(self, scenario: Scenario) -> Messages:
        if self.note is not None:
            key = self.settings["client"]["api_key"]
            self.note.write_text(key)
            logger.warning("signing in with %s", key)
            if scenario.id in self.refuses:
                raise RuntimeError(f"the service refuses {key}")
        return super().reset(scenario)
