"""Environments and engines that do what a test asks for. The engines speak the real protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from components.environments.protocol import Step
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest, Sampling
from components.rollout.collector import run_episodes
from components.trajectories.schema import Scenario, Trajectory

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def scenarios(count: int) -> list[Scenario]:
    return [Scenario(f"s{index}", {"number": index}, "train") for index in range(count)]


class Echo:
    """Two turns: asks, hears, and is content. `break_at` maps a place to what happens there."""

    made: list[Echo] = []

    def __init__(self, **break_at: Callable[[], Any]):
        self.break_at = break_at
        self.closed = False
        self.said: list[str] = []
        Echo.made.append(self)

    def _at(self, place: str, answer: Any) -> Any:
        return self.break_at[place]() if place in self.break_at else answer

    def scenarios(self, split: str) -> list[Scenario]:
        return scenarios(4) if split == "train" else []

    def tools(self) -> list[dict[str, Any]]:
        return self._at("tools", TOOLS)

    def reset(self, scenario: Scenario) -> list[dict[str, Any]]:
        self.scenario = scenario
        self.said = []
        return self._at("reset", [{"role": "user", "content": f"Say {scenario.input['number']}."}])

    def step(self, action: dict[str, Any]) -> Step:
        self.said.append(action["content"])
        done = len(self.said) == 2
        observation = [] if done else [{"role": "user", "content": "Again."}]
        return self._at("step", Step(observation, 0.5, done, {"success": done, "said": list(self.said)}))

    def close(self) -> None:
        self.closed = True
        self._at("close", None)


class AsyncEcho(Echo):
    """The same with awaited methods, as an environment behind a network has."""

    async def tools(self):
        await asyncio.sleep(0)
        return super().tools()

    async def reset(self, scenario):
        await asyncio.sleep(0.001)
        return super().reset(scenario)

    async def step(self, action):
        await asyncio.sleep(0.001)
        return super().step(action)

    async def close(self):
        await asyncio.sleep(0.001)
        super().close()

    async def solve(self, scenario):
        await asyncio.sleep(0)
        return [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]


class Parrot:
    """Says the seed of the request. A token is a character; a turn extends the tokens of the turn before."""

    policy = BASE_POLICY

    def __init__(self, *, seconds: float = 0.0, fail: Callable[[ChatRequest], Any] | None = None):
        self.seconds = seconds
        self.fail = fail
        self.requests: list[ChatRequest] = []

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        self.requests.append(request)
        await asyncio.sleep(self.seconds)
        if self.fail is not None:
            self.fail(request)
        prompt = [ord(letter) for message in request.messages for letter in message["content"]]
        said = str(request.seed)
        ids = [ord(letter) for letter in said]
        message = {"role": "assistant", "content": said}
        return ChatCompletion(message, "stop", prompt, ids, [-0.25] * len(ids), self.policy)

    def load_policy(self, version: str, adapter_dir: str | None) -> None:
        self.policy = version

    def close(self) -> None:
        pass


def collect(engine: Any, make: Callable[[], Any], jobs: list[Scenario], **options: Any) -> list[Trajectory]:
    settings = {
        "group_size": 2,
        "sampling": Sampling(max_tokens=8),
        "max_turns": 4,
        "concurrency": 3,
        "timeout": 600.0,
        "max_failures": 1000,
        "seed": 0,
    }
    return run_episodes(engine, make, jobs, **(settings | options))
