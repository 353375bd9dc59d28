"""What an environment needs beside it to be measured: a server, tasks, an interpreter that has its package.

    alfworld     kitchens of tests/environments/alfworld_games.py, in the form of ALFWorld's data
    mcp          tests/environments/mcp_server.py over stdio: baskets to be filled
    openenv      tests/environments/openenv_server.py, served by the package: numbers to be guessed; in OPENENV_PYTHON
    verifiers    the taskset vf_tools of tests/environments, played by the package in VERIFIERS_PYTHON

Raises ResourceError where the variable with the interpreter is not set.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from components.errors import ResourceError
from tests.environments import alfworld_games

TESTS = Path(__file__).resolve().parents[1] / "environments"
PACKAGES = {
    "babyai": "minigrid",
    "gym": "gymnasium",
    "mcp": "mcp",
    "reasoning": "reasoning-gym",
    "scienceworld": "scienceworld",
    "textarena": "textarena",
    "textworld": "textworld",
}
"""Distributions that play in this process."""
SUMS = 60
"""Tasks of verifiers."""


@contextlib.contextmanager
def beside(name: str) -> Iterator[tuple[list[str], str]]:
    """Overrides for the option `name`, and what plays it: a package with its version, or nothing for our own."""
    match name:
        case "alfworld":
            with tempfile.TemporaryDirectory() as folder:
                alfworld_games.write(Path(folder), train=16, valid=8)
                yield [f"environment.data={folder}"], f"textworld {_version('textworld')}"
        case "mcp":
            with tempfile.TemporaryDirectory() as folder:
                tasks = Path(folder) / "tasks.json"
                tasks.write_text(json.dumps(baskets()))
                command = json.dumps([sys.executable, str(TESTS / "mcp_server.py"), "stdio"])
                success = "{_target_: tests.benchmarks.beside.filled}"
                given = [f"scenarios={tasks}", f"command={command}", f"success={success}"]
                given.append("tools=[price,add,look]")  # the others go wrong on demand
                yield [*(f"environment.{one}" for one in given), "allow=[tests]"], f"mcp {version('mcp')}"
        case "openenv":
            python, plays = _interpreter("OPENENV_PYTHON", "openenv")
            with _serving([python, str(TESTS / "openenv_server.py")], "words", "real") as url:
                yield ["environment.name=guess", f"environment.url={url}", "environment.step_errors=tell"], plays
        case "verifiers":
            python, plays = _interpreter("VERIFIERS_PYTHON", "verifiers")
            given = [f"taskset={{id: vf_tools, count: {SUMS}}}", f"python={python}"]
            given.append(f"folders=[{TESTS / 'verifiers_tasks'}]")
            yield [f"environment.{one}" for one in given], plays
        case _ if name in PACKAGES:
            yield [], f"{PACKAGES[name]} {_version(PACKAGES[name])}"
        case _:
            yield [], ""


def baskets() -> list[dict[str, Any]]:
    """Tasks for the MCP server."""
    prices = {"lamp": 20, "kettle": 35, "chair": 50}
    tasks = []
    for (one, other), first, second in itertools.product(itertools.combinations(prices, 2), range(1, 7), range(1, 7)):
        cost = f"{first * prices[one] + second * prices[other]} dollars."
        calls = [{"tool": "add", "arguments": {"item": one, "number": first}}]
        calls.append({"tool": "add", "arguments": {"item": other, "number": second}})
        task = f"Put {first} times {one} and {second} times {other} into the basket, then say what they cost."
        tasks.append({"task": task, "solution": [*calls, {"say": cost}], "data": {"cost": cost}})
        tasks[-1]["data"]["basket"] = sorted([one] * first + [other] * second)
    return tasks


async def filled(episode: Any) -> bool:
    """Whether the basket holds what it should, and the cost was said."""
    inside = (await episode.call("look", {})).split()
    asked = episode.scenario.input["data"]
    return sorted(inside) == asked["basket"] and asked["cost"].strip(".") in episode.answer


def _version(distribution: str) -> str:
    with contextlib.suppress(ModuleNotFoundError):
        return version(distribution)
    return ""  # the environment itself says that it is missing


def _interpreter(variable: str, package: str) -> tuple[str, str]:
    """The interpreter that a variable names, and the package's version there."""
    python = os.environ.get(variable)
    if not python:
        raise ResourceError(f"{variable} names no interpreter that has {package}")
    told = f"from importlib.metadata import version; print(version({package!r}))"
    found = subprocess.run([python, "-c", told], capture_output=True, text=True, check=True)
    return python, f"{package} {found.stdout.strip()}"


@contextlib.contextmanager
def _serving(command: list[str], *arguments: str) -> Iterator[str]:
    """A server at a port of its own; its URL. Whoever connects waits until it is there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, str(port), *arguments])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
