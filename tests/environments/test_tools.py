"""Environments whose tools are methods: schemas from signatures, invalid calls."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import pytest

from components.environments.tools import InvalidAction, TextEnvironment, ToolEnvironment, acts, call, tool
from components.trajectories.schema import Scenario
from tests.environments import checks


class Counter(ToolEnvironment):
    system = "Count to the number that is asked for, then say it."

    def scenarios(self, split):
        names = {"train": range(2, 9), "heldout": range(9, 12)}
        return [Scenario(f"{split}-{n}", {"goal": n}, split) for n in names.get(split, ())]

    def begin(self, scenario):
        self.count = 0
        return f"Count to {scenario.input['goal']}."

    @tool
    def add(self, number: Annotated[int, "at most 3"], how: Literal["up", "down"] = "up") -> str:
        """Adds to
        the count."""
        if number > 3:
            raise InvalidAction("3 at most")
        self.count += number if how == "up" else -number
        self.reward += 0.5
        return str(self.count)

    @tool
    def stop(self) -> str:
        """Ends it."""
        self.done = True
        return "stopped"

    def outcome(self, answer):
        return {"success": self.count == self.scenario.input["goal"] and str(self.count) in answer}

    def solve(self, scenario):
        goal = scenario.input["goal"]
        steps = [3] * (goal // 3) + [goal % 3] * bool(goal % 3)
        calls = [call("add", {"number": number}, at) for at, number in enumerate(steps)]
        return [*calls, {"role": "assistant", "content": f"It is {goal}."}]

    def save(self):
        return [self.count, self.invalid_actions]

    def restore(self, scenario, state):
        self.reset(scenario)
        self.count, self.invalid_actions = state


class Echo(TextEnvironment):
    def scenarios(self, split):
        return [Scenario(f"{split}-{word}", {"word": word + split}, split) for word in "ab" if split in checks.SPLITS]

    def begin(self, scenario):
        self.right = False
        return "Say the word."

    def act(self, action):
        if not action:
            raise InvalidAction("say something")
        self.right = self.done = action == self.scenario.input["word"]
        return "yes" if self.right else "no"

    def outcome(self, answer):
        return {"success": self.right}

    def solve(self, scenario):
        return acts(["wrong", scenario.input["word"]])


def call_of(name: str, arguments: str) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_it_satisfies_the_environment_contract():
    checks.check(Counter)


def test_schema_follows_from_the_signature():
    add, stop = Counter().tools()
    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds to the count.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "number": {"type": "integer", "description": "at most 3"},
                    "how": {"enum": ["up", "down"], "type": "string", "default": "up"},
                },
                "required": ["number"],
            },
        },
    }
    assert stop["function"]["parameters"] == {"type": "object", "additionalProperties": False, "properties": {}}


def test_invalid_calls_are_reported_and_counted(subtests):
    for action, expected in [
        (call_of("add", '{"number": 2}'), "2"),
        (call_of("add", '{"number": "2"}'), "2"),
        (call_of("add", '{"number": 9}'), "error: 3 at most"),
        (call_of("add", "{}"), "error: add: number: Field required; it takes number, how"),
        (call_of("add", '{"number": 1, "often": 2}'), "error: add: often: Extra inputs are not permitted"),
        (call_of("add", '{"number": 1, "how": "sideways"}'), "error: add: how: Input should be 'up' or 'down'"),
        (call_of("add", "{"), "error: the arguments of add are no JSON object"),
        (call_of("add", "[1]"), "error: add: Input should be an object"),
        (call_of("remove", "{}"), "error: no tool remove; there are add, stop"),
        (call_of("begin", "{}"), "error: no tool begin"),
        (call_of("__init__", "{}"), "error: no tool __init__"),
    ]:
        with subtests.test(action=action):
            counter = Counter()
            counter.reset(counter.scenarios("train")[0])
            step = counter.step(action)
            assert step.observation[0]["content"].startswith(expected)
            assert step.observation[0]["tool_call_id"] == "c"
            assert step.info["invalid_actions"] == expected.startswith("error")
            assert step.reward == (0.0 if expected.startswith("error") else 0.5)


def test_calls_after_the_end_are_rejected():
    counter = Counter()
    counter.reset(counter.scenarios("train")[0])
    action = call_of("stop", "{}")
    action["tool_calls"].append({"id": "d", "function": {"name": "add", "arguments": json.dumps({"number": 2})}})
    step = counter.step(action)
    assert step.done
    assert [message["content"] for message in step.observation] == ["stopped", "error: the episode is over"]
    assert counter.count == 0


def test_text_environment_accepts_messages_and_tool_calls():
    checks.check(Echo)
    echo = Echo()
    scenario = echo.scenarios("train")[0]
    steps = checks.play(echo, scenario, [{"role": "assistant", "content": scenario.input["word"]}])
    assert steps[-1].done
    assert steps[-1].observation == [{"role": "user", "content": "yes"}]
    assert checks.solved(echo, scenario)
    silent = checks.play(
        echo, scenario, [call_of("act", "{}"), call_of("move", "{}"), {"role": "assistant", "content": " "}]
    )
    assert [step.observation[0]["content"][:6] for step in silent] == ["error:"] * 3
    assert silent[-1].info == {"invalid_actions": 3, "success": False}


def test_missing_methods_are_named():
    with pytest.raises(TypeError, match="outcome"):
        type("Half", (ToolEnvironment,), {"scenarios": lambda self, split: [], "begin": lambda self, scenario: ""})()
