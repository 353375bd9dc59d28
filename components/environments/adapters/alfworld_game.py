"""One ALFWorld game in TextWorld's engine, which plays `.tw-pddl` files with the planner fast-downward.

Loading a game replaces the process's stdout for a moment and its arguments for good, and the engine's parsers are
shared: games begin one at a time, and the arguments are put back. Things are named as ALFWorld names them ("mug 2"), so
that the walkthroughs of its data fit. The planner's search has no limit: it runs in a process of its own,

    python -m components.environments.adapters.alfworld_game PATH        writes the plan as a JSON list
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from components.environments.adapters.textworld import ONE_AT_A_TIME
from components.environments.optional_packages import import_optional
from components.errors import EnvironmentFailed

EXTRA = "alfworld"
_idle: list[Any] = []
"""Engines that play no game. Each has a copy of the planner's library, which is never unloaded: a process that had
unloaded one crashed when it loaded the next."""


class Game:
    """Has an engine until it is closed. state: what the engine says of the game now."""

    def __init__(self) -> None:
        import_optional("fast_downward", EXTRA)
        textworld = import_optional("textworld", EXTRA)
        pddl = import_optional("textworld.envs.pddl", EXTRA)
        with ONE_AT_A_TIME:
            infos = textworld.EnvInfos(admissible_commands=True, won=True)
            self._engine: Any = _idle.pop() if _idle else pddl.PddlEnv(infos)
        self.state: Any = None

    def begin(self, path: str) -> None:
        """Raises whatever the engine does where the file is no game."""
        data = json.loads(Path(path).read_bytes())
        with self._inside() as engine:
            engine.load(data)
            for identifier, name in names(engine._entity_infos).items():
                engine._entity_infos[identifier].name = name
            self.state = engine.reset()

    def step(self, command: str) -> None:
        with self._inside() as engine:
            self.state, _, _ = engine.step(command)

    def wins(self, path: str, commands: Sequence[str]) -> bool:
        """Whether they do, played from the start."""
        self.begin(path)
        for command in commands:
            self.step(command)
        return bool(self.state["won"])

    def plan(self, path: str) -> list[str]:
        """The planner's commands from the start of a game to its goal; none where it finds none. May take for ever."""
        self.begin(path)
        with self._inside() as engine:
            return list(engine._pddl_state.replan(engine._entity_infos))

    def walkthrough(self, path: str) -> list[str]:
        """That of the file; none where it has none."""
        self.begin(path)
        with self._inside() as engine:
            return list(engine.walkthrough or [])

    def close(self) -> None:
        """Leaves the engine for another game; waits for a thread that is in it."""
        with ONE_AT_A_TIME:
            if self._engine is not None:
                _idle.append(self._engine)
                self._engine = None

    @contextlib.contextmanager
    def _inside(self) -> Iterator[Any]:
        arguments = sys.argv
        with ONE_AT_A_TIME:
            if self._engine is None:
                raise EnvironmentFailed("the game was closed while it was played")
            try:
                yield self._engine
            except SystemExit as error:  # so the planner's translator ends
                raise EnvironmentFailed(f"the planner gave up: {error}") from error
            finally:
                sys.argv = arguments


def planned(path: str, seconds: float) -> list[str]:
    """The planner's commands, found in a process of its own. Raises EnvironmentFailed where that takes too long."""
    root, module = Path(__file__).resolve().parents[3], "components.environments.adapters.alfworld_game"
    command = [sys.executable, "-W", "ignore", "-m", module, path]
    try:
        found = subprocess.run(command, capture_output=True, cwd=root, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(
            f"the planner found nothing for {path} within {seconds:g} s (environment.plan_timeout)"
        ) from None
    if found.returncode:
        told = found.stderr.decode(errors="replace")[-500:].strip()
        raise EnvironmentFailed(f"the planner failed at {path}: {told}")
    return list(json.loads(found.stdout.splitlines()[-1]))


def names(identifiers: Iterable[str]) -> dict[str, str]:
    """What ALFWorld calls things: their kind and a number, the last one by its identifier being the first. An
    identifier is `KIND_bar_...`, that of a basin says so further on; any other is a name as it is."""
    kinds = {}
    for one in sorted(identifiers):
        kind, bar, _ = one.partition("_bar_")
        kinds[one] = kind + ("basin" if bar and "basin" in one else "") if bar else ""
    left = Counter(kinds.values())
    found = {}
    for one, kind in kinds.items():
        found[one] = f"{kind} {left[kind]}" if kind else one
        left[kind] -= 1
    return found


if __name__ == "__main__":
    print(json.dumps(Game().plan(sys.argv[1])))  # noqa: T201  its answer
