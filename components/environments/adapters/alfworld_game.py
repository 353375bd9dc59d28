"""An ALFWorld game in TextWorld's engine, which runs `.tw-pddl` files with the planner fast-downward.

Loading a game temporarily replaces stdout and permanently replaces `sys.argv`, and the engine's parsers are shared. A
lock therefore serializes calls of the engine, and `sys.argv` is restored. Objects have ALFWorld's names ("mug 2"), so
the walkthroughs of its data apply. The planner's search has no time limit, so it runs in a child process.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from components.environments.adapters.textworld import ONE_AT_A_TIME
from components.environments.optional_packages import import_optional
from components.errors import EnvironmentFailed
from components.json_process import JsonProgram, ProcessExited, RequestFailed

EXTRA = "alfworld"
_idle: list[Any] = []
"""Idle engines, reused by later games. Each engine has a copy of the planner's library. Copies are never unloaded,
because loading one after unloading another crashed the process."""


class AlfworldGame:
    """A game with its engine, until it is closed. state: current state of the game, from the engine."""

    def __init__(self) -> None:
        import_optional("fast_downward", EXTRA)
        textworld = import_optional("textworld", EXTRA)
        pddl = import_optional("textworld.envs.pddl", EXTRA)
        with ONE_AT_A_TIME:
            infos = textworld.EnvInfos(admissible_commands=True, won=True)
            self._engine: Any = _idle.pop() if _idle else pddl.PddlEnv(infos)
        self.state: Any = None

    def begin(self, path: str) -> None:
        """Load and start a game. Raises the exceptions of the engine if the file is not a game."""
        data = json.loads(Path(path).read_bytes())
        with self._locked_engine() as engine:
            engine.load(data)
            for identifier, name in names(engine._entity_infos).items():
                engine._entity_infos[identifier].name = name
            self.state = engine.reset()

    def step(self, command: str) -> None:
        with self._locked_engine() as engine:
            self.state, _, _ = engine.step(command)

    def wins(self, path: str, commands: Sequence[str]) -> bool:
        """Return True if the commands win the game from its start."""
        self.begin(path)
        for command in commands:
            self.step(command)
        return bool(self.state["won"])

    def plan(self, path: str) -> list[str]:
        """Return the planner's commands that win a game from its start; empty if there are none. Has no time limit."""
        self.begin(path)
        with self._locked_engine() as engine:
            return list(engine._pddl_state.replan(engine._entity_infos))

    def walkthrough(self, path: str) -> list[str]:
        """Return the walkthrough of the file; empty if it has none."""
        self.begin(path)
        with self._locked_engine() as engine:
            return list(engine.walkthrough or [])

    def close(self) -> None:
        """Release the engine for another game; waits for a thread that uses it."""
        with ONE_AT_A_TIME:
            if self._engine is not None:
                _idle.append(self._engine)
                self._engine = None

    @contextlib.contextmanager
    def _locked_engine(self) -> Iterator[Any]:
        arguments = sys.argv
        with ONE_AT_A_TIME:
            if self._engine is None:
                raise EnvironmentFailed("the game was closed during a step")
            try:
                yield self._engine
            except SystemExit as error:  # the planner's translator exits this way
                raise EnvironmentFailed(f"the planner failed: {error}") from error
            finally:
                sys.argv = arguments


def plan(path: str) -> list[str]:
    """Return the commands of the planner for a game, in the child process that `run_planner` starts."""
    return AlfworldGame().plan(path)


def run_planner(path: str, seconds: float) -> list[str]:
    """Return the planner's commands, computed in a child process. Raises EnvironmentFailed on failure and timeout."""
    planner = JsonProgram(f"{__name__}:plan", python=(sys.executable, "-W", "ignore"))
    try:
        return list(planner.call({"path": path}, seconds))
    except TimeoutError:
        raise EnvironmentFailed(
            f"the planner timed out for {path} after {seconds:g} s (environment.plan_timeout)"
        ) from None
    except (ProcessExited, RequestFailed) as error:
        raise EnvironmentFailed(f"the planner failed for {path}: {error!s:.500}") from None


def names(identifiers: Iterable[str]) -> dict[str, str]:
    """Return ALFWorld's name of each object: its kind and a number, in reverse order of the identifiers.

    An identifier is `KIND_bar_...`, with `basin` in it for a basin; other identifiers are names already.
    """
    kinds = {}
    for identifier in sorted(identifiers):
        kind, bar, _ = identifier.partition("_bar_")
        kinds[identifier] = kind + ("basin" if bar and "basin" in identifier else "") if bar else ""
    remaining = Counter(kinds.values())
    named = {}
    for identifier, kind in kinds.items():
        named[identifier] = f"{kind} {remaining[kind]}" if kind else identifier
        remaining[kind] -= 1
    return named
