"""What holds for every environment: to be called by the tests of each."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from components.environments.protocol import Environment, Restorable, Solver, Step
from components.rollout.agent import as_json, as_messages, as_step
from components.trajectories.schema import Scenario

SPLITS = ("train", "heldout")
JUNK: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "\x00\ud83d" * 3},
    *(
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}],
        }
        for name in ("", "act", "no_such_tool")
        for arguments in ("", "{", "[]", "null", '{"action": 3}', '{"x": NaN}', '{"action": "' + "a" * 10_000 + '"}')
    ),
]
"""What a model may say."""


def asked(found: Any) -> Any:
    """The answer of a method that may be asynchronous."""

    async def wait() -> Any:
        return await found

    return asyncio.run(wait()) if inspect.isawaitable(found) else found


def play(environment: Environment, scenario: Scenario, actions: Sequence[dict[str, Any]]) -> list[Step]:
    """The steps of an episode, until it ends or the actions do."""
    as_messages(asked(environment.reset(scenario)), "reset")
    steps = []
    for action in actions:
        steps.append(as_step(asked(environment.step(action))))
        if steps[-1].done:
            break
    return steps


def solved(environment: Environment, scenario: Scenario) -> bool:
    """Whether the environment's own solution ends the episode with success."""
    assert isinstance(environment, Solver)
    steps = play(environment, scenario, asked(environment.solve(scenario)))
    return bool(steps and steps[-1].info.get("success"))


def success_of(
    environment: Environment,
    scenarios: Sequence[Scenario],
    policy: Callable[[random.Random, list[dict[str, Any]]], dict[str, Any]],
    *,
    turns: int,
    seed: int = 0,
) -> float:
    """Share of the scenarios in which a policy succeeds: a function of a random generator and the messages so far."""
    wins = 0
    for number, scenario in enumerate(scenarios):
        draw = random.Random(f"{seed}-{number}")
        messages = list(as_messages(asked(environment.reset(scenario)), "reset"))
        for _ in range(turns):
            action = policy(draw, messages)
            step = as_step(asked(environment.step(action)))
            messages += [action, *step.observation]
            if step.done:
                break
        wins += bool(step.info.get("success"))
    return wins / len(scenarios)


def check(make: Callable[[], Environment], *, few: int = 3, solve: int = 0, solver: bool = True) -> None:
    """The protocol; splits that share nothing; equal episodes for equal actions; nothing that a model says breaks it;
    its own solution succeeds; a saved state goes on as the episode did. few: scenarios of each split to play; solve:
    those to solve, if these are more."""
    environment, other = make(), make()
    try:
        assert isinstance(environment, Environment)
        assert list(asked(environment.scenarios("no such split"))) == []
        found = {split: list(asked(environment.scenarios(split))) for split in SPLITS}
        again = {split: list(asked(other.scenarios(split))) for split in SPLITS}
        assert found == again
        assert all(found.values()), "no scenarios"
        ids = [scenario.id for scenarios in found.values() for scenario in scenarios]
        assert len(ids) == len(set(ids))
        inputs = [json.dumps(scenario.input, sort_keys=True) for scenarios in found.values() for scenario in scenarios]
        assert len(inputs) == len(set(inputs)), "two scenarios are the same task"
        for split, scenarios in found.items():
            assert all(scenario.split == split for scenario in scenarios)
        as_json(asked(environment.tools()), "tools")
        for scenario in [one for scenarios in found.values() for one in scenarios[:few]]:
            _check_scenario(environment, other, scenario, solver=solver)
        more = [scenario for scenarios in found.values() for scenario in scenarios[few:solve]]
        assert [scenario.id for scenario in more if not solved(environment, scenario)] == []
    finally:
        asked(environment.close())
        asked(other.close())


def _check_scenario(environment: Environment, other: Environment, scenario: Scenario, *, solver: bool) -> None:
    for action in JUNK:
        play(environment, scenario, [action])
    steps = play(environment, scenario, JUNK)
    assert not steps[-1].info.get("success")
    assert _plain(steps) == _plain(play(other, scenario, JUNK)), "equal actions, other episodes"
    if not solver:
        return
    assert isinstance(environment, Solver)
    actions = list(asked(environment.solve(scenario)))
    whole = play(environment, scenario, actions)
    assert whole[-1].done, "its own solution does not end the episode"
    assert whole[-1].info["success"] is True, f"its own solution fails: {whole[-1].info}"
    assert _plain(whole) == _plain(play(other, scenario, actions)), "equal actions, other episodes"
    if isinstance(environment, Restorable):
        half = len(actions) // 2
        play(environment, scenario, actions[:half])
        state = json.loads(json.dumps(asked(environment.save())))
        asked(other.restore(scenario, state))  # type: ignore[attr-defined]
        rest = [as_step(asked(other.step(action))) for action in actions[half : len(whole)]]
        assert _plain(rest) == _plain(whole[half:]), "a restored episode goes on otherwise"


def _plain(steps: Sequence[Step]) -> list[Any]:
    return [[step.observation, step.reward, step.done, step.info] for step in steps]
