"""Conformance of served environments with verifiers: evaluations by its own rollout code.

    VERIFIERS_PYTHON=PYTHON python -m tests.conformance.verifiers_environment [--environment NAME ...] [--json]

The package plays scenarios of each environment with a scripted policy behind OpenAI's chat completions: scenario 0 by
its solution, scenario 1 wrongly. The rewards must be those of the environment for the same messages. VERIFIERS_PYTHON
names the interpreter of an environment that has verifiers 0.4; Espalier's cannot have it.
"""

from __future__ import annotations

import argparse
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
from tests.conformance.reference_episodes import ReferenceEpisode, overrides_of, reference
from tests.conformance.report import Case, Report, show
from tests.conformance.scripted_model import serving_script

CLIENT = Path(__file__).with_name("verifiers_client.py")
SUITE = "verifiers, environments served"
COMMAND = "VERIFIERS_PYTHON=PYTHON python -m tests.conformance.verifiers_environment"
ENVIRONMENTS = ("shop", "maze", "memory", "sql")
"""Tools, text, several contexts, and tools again; each conversation has its own first user message."""


def python() -> str | None:
    """Return the interpreter that has the package; None if there is none."""
    if named := os.environ.get("VERIFIERS_PYTHON"):
        return named
    return sys.executable if importlib.util.find_spec("verifiers") else None


def episodes_of(name: str) -> list[ReferenceEpisode]:
    """Return a solved episode of scenario 0 and a wrong one of scenario 1 that ends."""
    return [
        next(episode for episode in reference(name, (0,)) if episode.kind == "solved"),
        next(episode for episode in reference(name, (1,)) if episode.kind == "wrong"),
    ]


def evaluate(interpreter: str, name: str, episodes: Sequence[ReferenceEpisode]) -> list[dict[str, Any]]:
    """Return what verifiers reports of its rollouts of the first scenarios."""
    scripts = {key: actions for episode in episodes for key, actions in episode.scripts().items()}
    with serving(create_app(load(overrides_of(name)))) as environment, serving_script(scripts) as model:
        line = [interpreter, str(CLIENT), environment, model, str(len(episodes))]
        done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{interpreter} {CLIENT.name} failed: {done.stderr[-2000:]}")
    reports: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return reports


def compare(episode: ReferenceEpisode, report: dict[str, Any]) -> str:
    """Return the difference between a rollout and the expected episode; empty if they are equal."""
    if report["errors"]:
        return str(report["errors"][0])
    if report["scenario"] != episode.scenario:
        return f"scenario {report['scenario']}, expected {episode.scenario}"
    if report["rewards"] != {"episode_score": episode.reward}:
        return f"rewards {report['rewards']}, expected episode_score {episode.reward:g}"
    if episode.done and report["turns"] != len(episode.actions):
        return f"{report['turns']} turns, expected {len(episode.actions)}"
    return ""


def run(interpreter: str, names: Sequence[str]) -> list[Case]:
    """Return the cases of the environments."""
    cases = []
    for name in names:
        episodes = episodes_of(name)
        for episode, report in zip(episodes, evaluate(interpreter, name, episodes), strict=True):
            problem = compare(episode, report)
            cases.append(Case(episode.name, "failed" if problem else "passed", problem))
    return cases


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.verifiers_environment", description=__doc__)
    parser.add_argument(
        "--environment", action="append", choices=ENVIRONMENTS, help="environment to check (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    interpreter = python()
    if interpreter is None:
        reason = "verifiers is not installed; VERIFIERS_PYTHON may name an interpreter that has it"
        return show(Report(SUITE, "", COMMAND, reason=reason), options.json)
    line = "import importlib.metadata as m; print(m.version('verifiers'))"
    version = subprocess.run([interpreter, "-c", line], capture_output=True, text=True, check=True).stdout.strip()
    return show(Report(SUITE, version, COMMAND, run(interpreter, options.environment or ENVIRONMENTS)), options.json)


if __name__ == "__main__":
    sys.exit(main())
