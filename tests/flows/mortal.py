"""An environment whose solver kills its process, or takes long, the first time that it meets a certain scenario."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from components.environments.protocol import Step
from components.errors import EnvironmentFailed
from components.trajectories.schema import Scenario


class Mortal:
    """Adds one. trap: number of the scenario. folder: where it notes each scenario that is solved. fate: what happens
    at the trap, once: `kill`, `wait` (until the file `free` is there) or `fail`."""

    def __init__(self, folder: str = "", trap: int = -1, fate: str = "kill", count: int = 6):
        self.folder = Path(folder)
        self.trap = trap
        self.fate = fate
        self.count = count

    @staticmethod
    def key_arguments(arguments):
        return {"count": arguments.get("count", 6)}

    def scenarios(self, split):
        return [Scenario(f"{split}-{n}", {"n": n}, split) for n in range(self.count)]

    def tools(self):
        return []

    def reset(self, scenario):
        self.scenario = scenario
        if self.fate == "fail" and self._trapped():
            raise EnvironmentFailed("not today")
        return [{"role": "user", "content": f"What comes after {scenario.input['n']}?"}]

    def step(self, action):
        success = action["content"] == str(self.scenario.input["n"] + 1)
        return Step([], float(success), True, {"success": success})

    def _trapped(self):
        trapped = self.scenario.input["n"] == self.trap and not (self.folder / "trapped").exists()
        if trapped:
            (self.folder / "trapped").touch()
        return trapped

    def solve(self, scenario):
        with (self.folder / "solved").open("a") as file:
            file.write(f"{scenario.input['n']}\n")
        if self.fate == "kill" and self._trapped():
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fate == "wait" and self._trapped():
            while not (self.folder / "free").exists():
                time.sleep(0.05)
        return [{"role": "assistant", "content": str(scenario.input["n"] + 1)}]

    def close(self):
        pass
