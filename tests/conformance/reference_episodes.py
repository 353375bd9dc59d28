"""Episodes that are played directly in an environment: the expected results of the same actions over a protocol.

A reward is computed here without the code of `flows.interop`: the success that the environment reports for the last
step (`reward=outcome`), or the sum of its step rewards (`reward=returned`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.environments.protocol import Step
from flows.experiment.compose import compose

BUILT_IN = (
    "airline",
    "arithmetic",
    "calculator",
    "deduction",
    "email_search",
    "game2048",
    "guess",
    "maze",
    "memory",
    "mixture",
    "movie",
    "retail",
    "shop",
    "sql",
    "textcraft",
    "tictactoe",
    "todo",
    "weather",
    "webshop",
    "wordle",
)
"""Built-in environments that need no extra package and no configuration."""
TURNS = "agent.max_turns=100"
WRONG: dict[str, Any] = {"role": "assistant", "content": "I give up."}


@dataclass(frozen=True)
class ReferenceEpisode:
    """Actions of one scenario and their results."""

    environment: str
    overrides: tuple[str, ...]
    kind: str
    """`solved` or `wrong`."""
    seed: int
    """Index of the scenario in the training split."""
    scenario: str
    first: tuple[dict[str, Any], ...]
    tools: tuple[str, ...]
    actions: tuple[dict[str, Any], ...]
    observations: tuple[tuple[dict[str, Any], ...], ...]
    new_contexts: tuple[bool, ...]
    """True for each step whose observation begins a new conversation."""
    done: bool
    reward: float

    @property
    def name(self) -> str:
        return f"{self.environment}: {self.kind}, scenario {self.seed}"

    def scripts(self) -> dict[str, list[dict[str, Any]]]:
        """Return the actions of each conversation by its first user message."""
        key = _first_user(self.first)
        scripts: dict[str, list[dict[str, Any]]] = {key: []}
        for action, observation, new in zip(self.actions, self.observations, self.new_contexts, strict=True):
            scripts[key].append(action)
            if new:
                key = _first_user(observation)
                scripts[key] = []
        return scripts


def overrides_of(name: str) -> tuple[str, ...]:
    """Return the overrides: enough turns for every solution, and rewards of steps where the environment has them."""
    returned = ("reward=returned",) if name == "game2048" else ()
    return (f"environment={name}", TURNS, *returned)


def reference(name: str, seeds: Sequence[int] = (0, 1)) -> list[ReferenceEpisode]:
    """Return a solved and a wrong episode for each seed."""
    overrides = overrides_of(name)
    environment = compose(overrides).environment.build()
    try:
        scenarios = result_of(environment.scenarios("train"))
        episodes = []
        for seed in seeds:
            scenario = scenarios[seed]
            for kind in ("solved", "wrong"):
                first = result_of(environment.reset(scenario))
                tools = tuple(tool["function"]["name"] for tool in result_of(environment.tools()))
                actions = result_of(environment.solve(scenario)) if kind == "solved" else [WRONG]
                steps: list[Step] = []
                for action in actions:
                    steps.append(result_of(environment.step(action)))
                    if steps[-1].done:
                        break
                returned = sum(step.reward for step in steps)
                reward = returned if "reward=returned" in overrides else float(bool(steps[-1].info.get("success")))
                episodes.append(
                    ReferenceEpisode(
                        name, overrides, kind, seed, scenario.id, tuple(first), tools, tuple(actions[: len(steps)]),
                        tuple(tuple(step.observation) for step in steps), tuple(step.new_context for step in steps),
                        steps[-1].done, reward,
                    )
                )  # fmt: skip
        return episodes
    finally:
        result_of(environment.close())


def _first_user(messages: Sequence[dict[str, Any]]) -> str:
    return next(str(message["content"]) for message in messages if message["role"] == "user")


def result_of(value: Any) -> Any:
    """Return the result of a method that may be asynchronous."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def text_of(messages: Sequence[dict[str, Any]]) -> str:
    """Return the text of messages as the protocols show it."""
    return "\n\n".join(str(message["content"]) for message in messages if message["content"])


def difference(expected: ReferenceEpisode, first: str, observations: Sequence[str], reward: float, done: bool) -> str:
    """Return the first difference between an episode over a protocol and the expected one; empty if they are equal."""
    if first != text_of(expected.first):
        return f"the task is {first!r:.100}, expected {text_of(expected.first)!r:.100}"
    if len(observations) != len(expected.observations):
        return f"{len(observations)} steps, expected {len(expected.observations)}"
    for number, (actual, messages) in enumerate(zip(observations, expected.observations, strict=True)):
        if actual != text_of(messages):
            return f"step {number + 1}: {actual!r:.100}, expected {text_of(messages)!r:.100}"
    if done != expected.done:
        return f"done is {done}, expected {expected.done}"
    if expected.done and abs(reward - expected.reward) > 1e-9:
        return f"reward {reward:g}, expected {expected.reward:g}"
    return ""
