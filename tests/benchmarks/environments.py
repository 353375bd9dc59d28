"""Every environment option that runs here: its scenarios, what its solver and what chance make of them, how fast it is.

    python -m tests.benchmarks.environments [--json] [--only shop,maze] [--scenarios 24] [--seconds 60]

An option whose package is missing, or that needs a server that `beside` does not start, is named with its reason. One
that a package plays says which (`plays`). The solver plays the
environment's own solutions. Chance draws actions that look legal: half of them from the solutions of training
scenarios, words and numbers exchanged for such as were said; else a random tool with arguments drawn from what was
said, or in an environment of text a word or a line of it. Both play held-out scenarios spread evenly over the split,
for at most `--seconds` each; `steps_per_s` is steps over the wall-clock time that the environment took for them, resets
included, one episode at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from components.environments.protocol import Environment, Solver
from components.environments.tools import ACT, call
from components.errors import ResourceError, SpecError
from components.rollout.agent import as_messages, as_step
from components.trajectories.schema import Scenario
from flows.experiment.compose import compose
from flows.experiment.config_loader import CONF
from tests.benchmarks.beside import beside

KNOWN = 24
"""Training scenarios whose solutions chance knows."""
TURNS = 30
"""Actions of chance in one episode."""
LONGEST_LINE = 80
"""Characters of a line that chance takes for an action."""
Actions = Callable[[Scenario, list[dict[str, Any]]], Iterator[dict[str, Any]]]
"""The actions of an episode, given what is said in it; the list grows."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures every environment option that runs here.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--only", default="", help="options, separated by commas; default: all")
    parser.add_argument("--scenarios", type=int, default=24, help="played by the solver, and by chance")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further episode begins")
    arguments = parser.parse_args()
    names = [name for name in arguments.only.split(",") if name]
    found = {}
    for name in names or sorted(path.stem for path in (CONF / "environment").glob("*.yaml")):
        found[name] = measure(name, arguments.scenarios, arguments.seconds)
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps(found))


def measure(name: str, count: int, seconds: float) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        try:
            given, plays = stack.enter_context(beside(name))
            environment = compose([f"environment={name}", *given, "warmup=none"]).environment.build()
        except SpecError as error:
            needs = [one.path for one in error.problems if "needs a value" in one.message]
            return {"not_measured": f"needs {', '.join(needs)}" if needs else str(error.problems[0].message)}
        except ResourceError as error:
            return {"not_measured": str(error)}
        runner = stack.enter_context(asyncio.Runner())
        found = played(environment, count, seconds, lambda answer: ran(runner, answer))
        return {"plays": plays, **found} if plays else found


def ran(runner: asyncio.Runner, answer: Any) -> Any:
    """The answer of a method that may be asynchronous; all on one loop, since connections belong to it."""

    async def wait() -> Any:
        return await answer

    return runner.run(wait()) if inspect.isawaitable(answer) else answer


def played(environment: Environment, count: int, seconds: float, asked: Callable[[Any], Any]) -> dict[str, Any]:
    """asked: turns what a method returns into its answer."""
    try:
        scenarios = {split: list(asked(environment.scenarios(split))) for split in ("train", "heldout")}
        chosen = spread(scenarios["heldout"], count)
        result: dict[str, Any] = {split: len(listed) for split, listed in scenarios.items()}
        tools = asked(environment.tools())
        steps, elapsed = 0, 0.0
        known: list[dict[str, Any]] = []
        ways: dict[str, Actions] = {"chance": lambda scenario, said: at_random(scenario, tools, known, said)}
        if isinstance(environment, Solver):
            solver = environment
            ways = {"solver": lambda scenario, said: iter(asked(solver.solve(scenario)))} | ways
            until = time.monotonic() + seconds
            for scenario in spread(scenarios["train"], KNOWN):
                asked(environment.reset(scenario))
                known += asked(solver.solve(scenario))
                if time.monotonic() > until:
                    break
        for way, actions in ways.items():
            result[way], did, took = rate(environment, chosen, actions, seconds, asked)
            steps, elapsed = steps + did, elapsed + took
        return result | {"steps_per_s": round(steps / elapsed, 1)}
    finally:
        asked(environment.close())


def spread(scenarios: list[Scenario], count: int) -> list[Scenario]:
    """So many of them, at equal distances."""
    count = min(count, len(scenarios))
    return [scenarios[index * len(scenarios) // count] for index in range(count)]


def rate(
    environment: Environment,
    scenarios: list[Scenario],
    actions: Actions,
    seconds: float,
    asked: Callable[[Any], Any],
) -> tuple[dict[str, int], int, float]:
    """Episodes tried and won, steps, and the seconds that the environment took."""
    began, spent = time.monotonic(), 0.0
    tried = won = steps = 0

    def timed(method: Callable[[Any], Any], argument: Any) -> Any:
        nonlocal spent
        start = time.monotonic()
        answer = asked(method(argument))
        spent += time.monotonic() - start
        return answer

    for scenario in scenarios:
        if time.monotonic() - began > seconds and tried:
            break
        said = list(as_messages(timed(environment.reset, scenario), "reset"))
        success = False
        for action in actions(scenario, said):
            step = as_step(timed(environment.step, action))
            said += [action, *step.observation]
            success, steps = bool(step.info.get("success")), steps + 1
            if step.done:
                break
        tried, won = tried + 1, won + success
    return {"tried": tried, "won": won}, steps, spent


def at_random(
    scenario: Scenario, tools: list[dict[str, Any]], known: list[dict[str, Any]], said: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    draw = random.Random(scenario.id)
    text_only = not tools or [tool["function"]["name"] for tool in tools] == [ACT.name]
    for number in range(TURNS):
        words = _words(said)
        if known and draw.random() < 1 / 2:
            yield _borrowed(draw, draw.choice(known), words)
        elif text_only:
            yield {"role": "assistant", "content": _line(draw, said, words)}
        elif draw.random() < 1 / 8:
            yield {"role": "assistant", "content": draw.choice(words)}
        else:
            function = draw.choice(tools)["function"]
            schema = function.get("parameters") or {}
            required = schema.get("required") or []
            given = {
                name: _value(draw, one, words, schema.get("$defs", {}))
                for name, one in (schema.get("properties") or {}).items()
                if name in required or draw.random() < 0.5
            }
            yield call(function["name"], given, number)


def _borrowed(draw: random.Random, action: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """An action of another scenario, with words and numbers of this one."""
    calls = []
    for one in action.get("tool_calls") or []:
        given = json.loads(one["function"]["arguments"])
        if one["function"]["name"] != ACT.name:
            given = {name: _exchanged(draw, value, words) for name, value in given.items()}
        calls.append({**one, "function": {**one["function"], "arguments": json.dumps(given)}})
    return {**action, "tool_calls": calls} if calls else action


def _exchanged(draw: random.Random, value: Any, words: list[str]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str) or draw.random() < 1 / 2:
        return value
    return _value(draw, {"type": "string" if isinstance(value, str) else "integer"}, words, {})


def _words(said: list[dict[str, Any]]) -> list[str]:
    text = " ".join(str(message["content"]) for message in said if message["role"] != "assistant")
    return re.findall(r"[\w@.#-]*\w", text) or ["yes"]


def _line(draw: random.Random, said: list[dict[str, Any]], words: list[str]) -> str:
    """A short line, an item of a list, or some words of what was said: where actions are listed, one of them."""
    shown = [message["content"] for message in said if message["role"] != "assistant"]
    text = draw.choice([shown[0], shown[-1]])
    parts = [part.strip(" -*.:;>") for part in re.split(r"[\n,|;]", text)]
    short = [part for part in parts if 0 < len(part) <= LONGEST_LINE]
    if short and draw.random() < 0.7:
        return draw.choice(short)
    return " ".join(draw.choices(words, k=draw.choice((1, 1, 2, 3))))


def _value(draw: random.Random, schema: Any, words: list[str], named: dict[str, Any]) -> Any:
    """A value of a JSON schema."""
    schema = schema if isinstance(schema, dict) else {}
    if "$ref" in schema:
        schema = named.get(schema["$ref"].rpartition("/")[2], {})
    if "enum" in schema:
        return draw.choice(schema["enum"])
    for one in ("anyOf", "oneOf"):
        if one in schema:
            return _value(draw, draw.choice(schema[one]), words, named)
    numbers = [int(word) for word in words if word.isdigit() and len(word) < 7] or [1]
    match schema.get("type"):
        case "integer":
            return draw.choice(numbers)
        case "number":
            return float(draw.choice(numbers))
        case "boolean":
            return draw.random() < 0.5
        case "null":
            return None
        case "array":
            return [_value(draw, schema.get("items"), words, named) for _ in range(draw.randint(1, 2))]
        case "object":
            return {key: _value(draw, value, words, named) for key, value in (schema.get("properties") or {}).items()}
    return draw.choice(words)


if __name__ == "__main__":
    main()
