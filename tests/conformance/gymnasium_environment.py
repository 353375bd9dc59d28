"""Conformance of environments as Gymnasium environments: the package's checker, and episodes.

    python -m tests.conformance.gymnasium_environment [--environment NAME ...] [--json]

For each built-in environment `gymnasium.utils.env_checker.check_env` must pass without a warning, and a solved and a
wrong episode must have the observations and rewards of the environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from tests.conformance.reference_episodes import BUILT_IN, ReferenceEpisode, difference, overrides_of, reference
from tests.conformance.report import Case, Report, show

SUITE = "Gymnasium, environments wrapped"
COMMAND = "python -m tests.conformance.gymnasium_environment"
ID = "flows.interop.gymnasium:Espalier-v0"


def action_of(message: dict[str, Any]) -> str:
    """Return an action as text: the message itself, or its tool calls as JSON."""
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps(calls) if calls else str(message["content"])


def check(name: str) -> str:
    """Return the first complaint of Gymnasium's checker; empty if there is none."""
    import gymnasium
    from gymnasium.utils.env_checker import check_env

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment = gymnasium.make(ID, overrides=overrides_of(name))
        try:
            check_env(environment.unwrapped)
        except (AssertionError, Warning, gymnasium.error.Error) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            environment.close()
    return ""


def play(environment: Any, episode: ReferenceEpisode) -> str:
    """Return the difference between an episode in the wrapper and the expected one; empty if they are equal."""
    first, info = environment.reset(seed=episode.seed)
    if info["scenario"] != episode.scenario:
        return f"seed {episode.seed} is {info['scenario']}, expected {episode.scenario}"
    observations, total, terminated = [], 0.0, False
    for action in episode.actions:
        observation, reward, terminated, truncated, _ = environment.step(action_of(action))
        observations.append(observation)
        total += reward
        if truncated:
            return "truncated"
    return difference(episode, first, observations, total, terminated)


def run(names: Sequence[str]) -> list[Case]:
    """Return the cases of the environments."""
    from flows.interop.gymnasium import make

    cases = []
    for name in names:
        cases.append(_case(f"{name}: check_env", check(name)))
        environment = make(*overrides_of(name))
        try:
            cases += [_case(episode.name, play(environment, episode)) for episode in reference(name)]
        finally:
            environment.close()
    return cases


def _case(name: str, problem: str) -> Case:
    return Case(name, "failed" if problem else "passed", problem)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.gymnasium_environment", description=__doc__)
    parser.add_argument("--environment", action="append", choices=BUILT_IN, help="environment to check (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("gymnasium") is None:
        return show(Report(SUITE, "", COMMAND, reason="gymnasium is not installed"), options.json)
    from gymnasium import __version__

    return show(Report(SUITE, __version__, COMMAND, run(options.environment or BUILT_IN)), options.json)


if __name__ == "__main__":
    sys.exit(main())
