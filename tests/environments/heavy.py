"""An environment that computes, crashes and hangs on demand, to be run in a process of its own."""

from __future__ import annotations

import os
import signal
import time

from components.environments.adapters.agentgym_server import ServerGone
from components.environments.protocol import Step
from components.errors import EnvironmentUnavailable, Problem, SpecError
from components.trajectories.schema import Scenario


class Heavy:
    """seconds: of computing in each step. trouble: what happens in the steps of the scenario `trouble`."""

    good_for = None

    def __init__(self, seconds: float = 0.0, trouble: str = "", size: int = 1):
        if size < 1:
            raise SpecError([Problem("environment.size", f"{size}: expected 1 or more")])
        self.seconds = seconds
        self.trouble = trouble

    def scenarios(self, split):
        names = ["a", "b", "trouble", "c"] if split == "train" else []
        return [Scenario(name, {"number": index}, split, "kind", 2) for index, name in enumerate(names)]

    def tools(self):
        return []

    def reset(self, scenario):
        self.scenario, self.said = scenario, []
        return [{"role": "user", "content": f"Say {scenario.input['number']}."}]

    def step(self, action):
        if self.scenario.id == "trouble" and self.trouble:
            getattr(self, self.trouble)()
        end = time.process_time() + self.seconds
        while time.process_time() < end:
            pass
        self.said.append(action["content"])
        done = len(self.said) == 2
        info = {"success": done, "said": list(self.said), "process": os.getpid() if self.seconds else 0}
        return Step([] if done else [{"role": "user", "content": "Again."}], 0.5, done, info)

    def solve(self, scenario):
        return [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]

    async def save(self):
        return self.said

    async def restore(self, scenario, state):
        self.scenario, self.said = scenario, list(state)

    def close(self):
        print("closed")  # not a result, wherever it goes

    def die(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self):
        raise SystemExit(3)

    def hang(self):
        while True:
            pass

    def bug(self):
        raise KeyError("no such page")

    def away(self):
        raise EnvironmentUnavailable("HTTP 503")

    def gone(self):
        raise ServerGone("nobody listens")

    def refused(self):
        raise ConnectionRefusedError("nobody listens")

    def odd(self):
        self.said.append(object())
