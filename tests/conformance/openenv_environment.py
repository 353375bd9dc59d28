"""Conformance of served environments with OpenEnv: its validation, and episodes of its own client.

    OPENENV_PYTHON=PYTHON python -m tests.conformance.openenv_environment [--environment NAME ...] [--json]

Each built-in environment is served; `openenv validate` checks the server, and OpenEnv's client plays a solved and a
wrong episode, whose observations and rewards must equal those of the environment. OPENENV_PYTHON names the interpreter
of an environment that has openenv 0.10; Espalier's cannot have it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.interop.listening import serving
from flows.interop.openenv import create_app
from flows.interop.source import load
from tests.conformance.reference_episodes import BUILT_IN, ReferenceEpisode, difference, overrides_of, reference
from tests.conformance.report import Case, Report, show

CLIENT = Path(__file__).with_name("openenv_client.py")
COMMAND = "OPENENV_PYTHON=PYTHON python -m tests.conformance.openenv_environment"


def python() -> str | None:
    """Return the interpreter that has the package; None if there is none."""
    if named := os.environ.get("OPENENV_PYTHON"):
        return named
    return sys.executable if importlib.util.find_spec("openenv") else None


def action_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return an action in OpenEnv's form: a tool call, several, or a message."""
    calls = message.get("tool_calls") or []
    if not calls:
        return {"message": message["content"]}
    if len(calls) > 1:
        return {"tool_calls": calls, "message": message.get("content") or ""}
    function = calls[0]["function"]
    return {"type": "call_tool", "tool_name": function["name"], "arguments": json.loads(function["arguments"])}


def request_of(url: str, episode: ReferenceEpisode, client: str = "generic") -> dict[str, Any]:
    """Return the request to play an episode."""
    actions = [action_of(action) for action in episode.actions]
    return {"url": url, "client": client, "reset": {"seed": episode.seed}, "actions": actions}


def ask(interpreter: str, validate: Sequence[str], episodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what OpenEnv's clients report."""
    request = json.dumps({"validate": list(validate), "episodes": list(episodes)})
    done = subprocess.run([interpreter, str(CLIENT)], input=request, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"{interpreter} {CLIENT.name} failed: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def seen(step: dict[str, Any]) -> str:
    """Return the text of a step's observation."""
    observation = step["observation"]
    return str(observation["result"] if "result" in observation else observation["text"])


def compare(episode: ReferenceEpisode, report: dict[str, Any]) -> str:
    """Return the difference between a played episode and the expected one; empty if they are equal."""
    if report["error"]:
        return str(report["error"])
    steps = report["steps"]
    reward = sum(step["reward"] for step in steps)
    return difference(episode, report["first"]["text"], [seen(step) for step in steps], reward, steps[-1]["done"])


def run(interpreter: str, names: Sequence[str]) -> list[Case]:
    """Return the cases of the environments."""
    episodes = [episode for name in names for episode in reference(name)]
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(serving(create_app(load(overrides_of(name))))) for name in names}
        requests = [request_of(urls[episode.environment], episode) for episode in episodes]
        answer = ask(interpreter, list(urls.values()), requests)
    cases = []
    for name, report in zip(names, answer["validation"], strict=True):
        failed = [criterion["id"] for criterion in report["criteria"] if not criterion["passed"]]
        cases.append(_case(f"{name}: openenv validate", ", ".join(failed)))
    for episode, played in zip(episodes, answer["episodes"], strict=True):
        cases.append(_case(episode.name, compare(episode, played)))
    return cases


def _case(name: str, problem: str) -> Case:
    return Case(name, "failed" if problem else "passed", problem)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.openenv_environment", description=__doc__)
    parser.add_argument("--environment", action="append", choices=BUILT_IN, help="environment to check (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    interpreter = python()
    if interpreter is None:
        reason = "openenv is not installed; OPENENV_PYTHON may name an interpreter that has it"
        return show(Report("OpenEnv, environments served", "", COMMAND, reason=reason), options.json)
    cases = run(interpreter, options.environment or BUILT_IN)
    return show(Report("OpenEnv, environments served", _version(interpreter), COMMAND, cases), options.json)


def _version(interpreter: str) -> str:
    line = "import importlib.metadata as m; print(m.version('openenv'))"
    return subprocess.run([interpreter, "-c", line], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
