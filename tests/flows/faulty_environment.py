"""An environment with one fault on demand, for the tests of the qualification."""

from __future__ import annotations

import random

from components.environments.protocol import Step
from components.trajectories.schema import Scenario


class Sums:
    """Faultless environment: add two numbers. fault: name of what goes wrong."""

    shared = 0

    def __init__(self, fault: str = ""):
        self.fault = fault

    def scenarios(self, split):
        first = {"train": 0, "heldout": 0 if self.fault == "splits" else 40}.get(split)
        numbers = range(0) if first is None else range(first, first + 40)
        return [Scenario(f"{split}-{n}", {"a": n * 3, "b": 100 + n * 5}, split) for n in numbers]

    def tools(self):
        return []

    def reset(self, scenario):
        self.scenario, self.steps = scenario, 0
        Sums.shared = 0
        noise = f" {random.random()}" if self.fault == "replay" else ""
        return [{"role": "user", "content": f"Add {scenario.input['a']} and {scenario.input['b']}.{noise}"}]

    def step(self, action):
        self.steps += 1
        Sums.shared += 1
        text, right = str(action["content"]), str(sum(self.scenario.input.values()))
        success = {
            "exploits": right in text.split(),
            "chance": True,
            "solver": False,
        }.get(self.fault, text.strip() == right)
        if self.fault == "isolation":
            success = success and Sums.shared == self.steps
        done = self.steps == 2
        return Step([] if done else [{"role": "user", "content": "Again."}], 0.0, done, {"success": success})

    def solve(self, scenario):
        words = "a b " * 2000 if self.fault == "length" else ""
        return [{"role": "assistant", "content": words}, {"role": "assistant", "content": str(self._sum(scenario))}]

    def _sum(self, scenario):
        return sum(scenario.input.values())

    def close(self):
        pass


class Unsolved(Sums):
    """Environment whose `solve` raises (fault `solve`), or gives wrong answers."""

    def solve(self, scenario):
        if self.fault == "solve":
            raise KeyError("answers")
        return [{"role": "assistant", "content": "wrong"}] * 2
