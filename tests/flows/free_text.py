"""Environment whose actions are free text, without solutions."""

from __future__ import annotations

from components.environments.tools import TextEnvironment
from components.trajectories.schema import Scenario


class FreeText(TextEnvironment):
    def scenarios(self, split):
        return [Scenario(f"{split}-{number}", {}, split) for number in range(4)]

    def begin(self, scenario):
        return "Say something."

    def act(self, action):
        self.done = True
        return "thanks"

    def outcome(self, answer):
        return {"success": self.done}
