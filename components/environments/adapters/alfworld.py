"""ALFWorld: household tasks as text games: find, take, clean, heat, cool, put.

Games come from ALFWorld's data, a folder that is downloaded once:
`json_2.1.1/{train,valid_seen,valid_unseen}/TASK/TRIAL/{game.tw-pddl,traj_data.json}`. Like ALFWorld, this module skips
games that are unsolvable, move receptacles, or slice objects. Games run in TextWorld's engine. Solutions come from the
walkthrough of a game or, if it does not win, from the engine's planner.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from components.environments.adapters.alfworld_game import EXTRA, AlfworldGame, run_planner
from components.environments.optional_packages import import_optional
from components.environments.restorable import RestorableActions
from components.environments.seeded import Count
from components.environments.tools import InvalidAction, acts, shorten, with_commands
from components.errors import EnvironmentFailed, ResourceError
from components.specs.marks import FILES
from components.specs.registered import registered
from components.trajectories.schema import Scenario

SYSTEM = (
    "You do a task in a household. Each turn, say one command, such as: go to X, open X, close X, take X from Y, "
    "move X to Y, clean X with Y, heat X with Y, cool X with Y, use X, examine X, look, inventory."
)
MAX_COMMANDS = 100
"""Maximum number of possible commands in an observation."""
GAMES = "json_2.1.1"
"""Folder of the games in ALFWorld's data."""

Task = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
DIFFICULTY = dict(zip(get_args(Task), (1, 2, 3, 3, 3, 4), strict=True))
"""Difficulty by task."""


@registered("environment.alfworld")
class ALFWorld(RestorableActions):
    """ALFWorld's household tasks.

    Scenario types: the tasks. Difficulty: 1 to 4 by task, see DIFFICULTY.

    Args:
        data: ALFWorld's data folder; null takes the environment variable ALFWORLD_DATA, otherwise ~/.cache/alfworld.
        tasks: Tasks, in equal proportions; null takes all six.
        unseen: True takes held-out games in rooms that do not occur in training (`valid_unseen`), false `valid_seen`.
        commands: Show the possible commands in observations.
        seed: Seed of the choice of games.
        train, heldout: Maximum number of scenarios of the split; null takes all.
        max_steps: Maximum number of steps of an episode.
        plan_timeout: Timeout of the planner in seconds, for games whose walkthrough does not win.
    """

    blocking = True
    """Methods block, so they run in threads."""

    def __init__(
        self,
        data: Annotated[str | None, FILES] = None,
        tasks: Annotated[Sequence[Task], Field(min_length=1)] | None = None,
        unseen: bool = True,
        commands: bool = True,
        seed: int = 0,
        train: Count | None = 512,
        heldout: Count | None = None,
        max_steps: Annotated[int, Field(ge=1)] = 50,
        plan_timeout: Annotated[float, Field(gt=0)] = 300.0,
    ):
        import_optional("textworld", EXTRA)
        import_optional("fast_downward", EXTRA)
        self.root = data_folder(data)
        folders = {"train": "train", "heldout": "valid_unseen" if unseen else "valid_seen"}
        for name in folders.values():
            if next((self.root / GAMES / name).glob("*/*/game.tw-pddl"), None) is None:
                raise ResourceError(missing_message(self.root / GAMES / name))
        selected = tuple(dict.fromkeys(tasks)) if tasks is not None else get_args(Task)
        counts = {"train": train, "heldout": heldout}
        self._scenarios = [
            Scenario(game.split("/", 1)[1], {"game": game, "digest": digest}, split, task, DIFFICULTY[task])
            for split, name in folders.items()
            for task, game, digest in select_games(str(self.root), name, selected, counts[split], seed)
        ]
        self.commands, self.max_steps, self.plan_timeout = commands, max_steps, plan_timeout
        self.system = SYSTEM
        self.game: AlfworldGame | None = None

    @staticmethod
    def key_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for stage keys: games by their content, without the folder and the planner's timeout."""
        relevant = {name: value for name, value in arguments.items() if name not in ("data", "plan_timeout")}
        inputs = [scenario.input for scenario in ALFWorld(**arguments)._scenarios]
        return relevant | {"games": hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()}

    def begin(self, scenario: Scenario) -> str:
        self.game = self.game or AlfworldGame()
        self.game.begin(self._path(scenario))
        return self._observation()

    def act(self, action: str) -> str:
        if self.game is None:
            raise InvalidAction("the episode is over")
        command = " ".join(action[:200].lower().strip(' .!"`').split())
        self.invalid_actions += command not in self.game.state["admissible_commands"]
        self.game.step(command)
        self.action_log.append(command)
        self.reward += float(self.game.state["won"])
        self.done = bool(self.game.state["won"]) or len(self.action_log) >= self.max_steps
        return self._observation()

    def legal_actions(self) -> list[str]:
        assert self.game is not None
        return list(self.game.state["admissible_commands"])

    def outcome(self, answer: str) -> dict[str, Any]:
        won = self.game is not None and bool(self.game.state["won"])
        return {"success": won, "progress": float(won), "steps": len(self.action_log)}

    def close(self) -> None:
        if self.game is not None:
            self.game.close()
            self.game = None

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return a solution; it runs in a separate game, so the current episode does not change.

        Raises EnvironmentFailed if neither the walkthrough nor the planner wins.
        """
        path, game = self._path(scenario), AlfworldGame()
        try:
            for solver in (game.walkthrough, lambda path: run_planner(path, self.plan_timeout)):
                commands = solver(path)
                if commands and game.wins(path, commands):
                    return acts(commands)
        finally:
            game.close()
        raise EnvironmentFailed(f"{scenario.input['game']}: neither the walkthrough nor the planner wins")

    def _path(self, scenario: Scenario) -> str:
        return str(self.root / GAMES / scenario.input["game"] / "game.tw-pddl")

    def _observation(self) -> str:
        assert self.game is not None
        lines = str(self.game.state["feedback"]).split("\n")
        text = "\n".join(line for line in lines if line.strip() and not line.startswith("-="))
        text = shorten(text)
        if not self.commands or self.done:
            return text
        return with_commands(text, list(self.game.state["admissible_commands"]), MAX_COMMANDS)


def data_folder(data: str | None) -> Path:
    """Return ALFWorld's data folder."""
    return Path(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser().absolute()


def missing_message(folder: Path) -> str:
    """Return the error message for a folder without games."""
    return (
        f"environment.data: no game in {folder}; download ALFWorld's data (pip install alfworld, then "
        "alfworld-download --data-dir DIR), and set environment.data=DIR or the environment variable ALFWORLD_DATA"
    )


@functools.cache
def select_games(
    root: str, name: str, tasks: tuple[str, ...], limit: int | None, seed: int
) -> list[tuple[str, str, str]]:
    """Return (task, path below GAMES, digest) of games of a folder.

    Games are shuffled by the seed, and tasks alternate, until `limit` games are selected or none remain. Only the
    necessary files are read.
    """
    games = Path(root) / GAMES
    trials = sorted(path.parent.relative_to(games).as_posix() for path in (games / name).glob("*/*/game.tw-pddl"))
    random.Random(f"{seed} {name}").shuffle(trials)
    limit = len(trials) if limit is None else limit
    by_task: dict[str, list[tuple[str, str, str]]] = {task: [] for task in tasks}
    for trial in trials:
        if all(len(entries) * len(tasks) >= limit for entries in by_task.values()):
            break
        task = _task(games, trial)
        if task in by_task and (digest := _digest(games / trial / "game.tw-pddl")):
            by_task[task].append((task, trial, digest))
    mixed = [entry for index in range(limit) for entries in by_task.values() for entry in entries[index : index + 1]]
    return mixed[:limit]


def _task(games: Path, trial: str) -> str:
    """Return the task of a trial; empty if ALFWorld skips the trial."""
    file = games / trial / "traj_data.json"
    if "movable" in trial or "Sliced" in trial or not file.is_file():
        return ""
    return str(_read(file, file.read_bytes()).get("task_type"))


def _digest(file: Path) -> str:
    """Return the digest of a game; empty if it is not marked as solvable."""
    data = file.read_bytes()
    return hashlib.sha256(data).hexdigest()[:16] if _read(file, data).get("solvable") else ""


def _read(file: Path, data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ResourceError(f"environment.data: {file} is not a JSON object; download ALFWorld's data again")
    return content
