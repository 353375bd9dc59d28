"""An environment that any text solves with a probability of one half, so that random weights succeed and fail."""

from __future__ import annotations

from components.environments.protocol import Step
from components.trajectories.schema import Scenario


class Parity:
    """The first character of the answer must have an even code."""

    def scenarios(self, split):
        return [Scenario(f"{split}-{n}", {"n": n}, split) for n in range({"train": 40, "heldout": 40}.get(split, 0))]

    def tools(self):
        return []

    def reset(self, scenario):
        return [{"role": "user", "content": f"Task {scenario.input['n']}"}]

    def step(self, action):
        text = str(action["content"])
        return Step([], 0.0, True, {"success": bool(text) and ord(text[0]) % 2 == 0})

    def close(self):
        pass


class Doors(Parity):
    """A door that is always open, before the answer of `Parity`."""

    door = "open"

    def reset(self, scenario):
        self.turn = 0
        return super().reset(scenario)

    def step(self, action):
        self.turn += 1
        return (
            super().step(action) if self.turn == 2 else Step([{"role": "user", "content": f"The door is {self.door}"}])
        )


def unscored(trajectory):
    """Return no reward for any episode."""
    return None


def constant(trajectory):
    """Return the same reward for every episode."""
    return 1.0


def negated(trajectory):
    """Return the opposite of success."""
    return -float(trajectory.success)
