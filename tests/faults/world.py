"""A shop that notes each episode that it sees end, so that one which is played again is noticed."""

from __future__ import annotations

import os
import time
from typing import Any

from components.environments.protocol import Step
from components.environments.worlds.shop import Shop
from components.trajectories.schema import Scenario

NOTES = "ESPALIER_FAULTS_NOTES"
"""Environment variable: the file."""


class NotedShop(Shop):
    """The shop, with a line for each episode of a policy that ended; demonstrations are not noted."""

    def reset(self, scenario: Scenario) -> list[dict[str, Any]]:
        self._shown = False
        return super().reset(scenario)

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        self._shown = True
        return super().solve(scenario)

    def step(self, message: dict[str, Any]) -> Step:
        step = super().step(message)
        if step.done and not self._shown and NOTES in os.environ:
            with open(os.environ[NOTES], "a") as file:
                file.write(f"{self.scenario.input['order']}\n")
        return step


class HangingShop(Shop):
    """A shop whose step never returns, and holds up the whole event loop."""

    def step(self, message: dict[str, Any]) -> Step:
        time.sleep(300)
        return super().step(message)
