"""ALFWorld: tasks of a household in rooms, as text: find, take, clean, heat, cool, put.

The games are those of ALFWorld's data, a folder that is downloaded once:
`json_2.1.1/{train,valid_seen,valid_unseen}/TASK/TRIAL/{game.tw-pddl,traj_data.json}`. Left out are those that ALFWorld
leaves out: unsolvable, with receptacles that are moved, with things that are sliced. They are played in TextWorld's
engine; the walkthrough of a game is the solver, and where it has none that wins, the engine's planner.
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

from components.environments.adapters.alfworld_game import EXTRA, Game, planned
from components.environments.optional_packages import import_optional
from components.environments.scenario_counts import Count
from components.environments.tools import Invalid, TextEnvironment, acts
from components.errors import EnvironmentFailed, ResourceError
from components.specs.registered import registered
from components.trajectories.schema import Scenario

SYSTEM = (
    "You do a task in a household. Each turn, say one command, such as: go to X, open X, close X, take X from Y, "
    "move X to Y, clean X with Y, heat X with Y, cool X with Y, use X, examine X, look, inventory."
)
LONGEST = 4_000
"""Characters of an observation; what is longer is cut."""
SHOWN = 100
"""Commands that are shown at most."""
GAMES = "json_2.1.1"
"""The folder of games in ALFWorld's data."""

Task = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
DIFFICULTY = dict(zip(get_args(Task), (1, 2, 3, 3, 3, 4), strict=True))


@registered("environment.alfworld")
class ALFWorld(TextEnvironment):
    """data: ALFWorld's folder; null: what the variable ALFWORLD_DATA says, else ~/.cache/alfworld. tasks: mixed evenly;
    null: all six. unseen: whether the held-out games are in rooms that the others are not in (`valid_unseen`; else
    `valid_seen`). commands: whether those that are possible are shown. seed: of the choice of games. train, heldout:
    most scenarios of the two splits; null: all that there are. max_steps: after which an episode ends. plan_timeout:
    seconds that the planner may take for a solution where the walkthrough does not win.

    Scenario types: the tasks. Difficulty: 1 to 4, by what is to be done; see DIFFICULTY.
    """

    blocking = True
    """Its methods take long: they are run in threads."""

    def __init__(
        self,
        data: str | None = None,
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
        self.root = folder(data)
        folders = {"train": "train", "heldout": "valid_unseen" if unseen else "valid_seen"}
        for one in folders.values():
            if next((self.root / GAMES / one).glob("*/*/game.tw-pddl"), None) is None:
                raise ResourceError(missing(self.root / GAMES / one))
        asked = tuple(dict.fromkeys(tasks)) if tasks is not None else get_args(Task)
        counts = {"train": train, "heldout": heldout}
        self._scenarios = [
            Scenario(game.split("/", 1)[1], {"game": game, "digest": digest}, split, task, DIFFICULTY[task])
            for split, name in folders.items()
            for task, game, digest in chosen(str(self.root), name, asked, counts[split], seed)
        ]
        self.commands, self.max_steps, self.plan_timeout = commands, max_steps, plan_timeout
        self.system = SYSTEM
        self.game: Game | None = None
        self.over = True

    @staticmethod
    def key_arguments(given: dict[str, Any]) -> dict[str, Any]:
        """The games count by what they hold, not by where they are; our patience with the planner does not."""
        kept = {name: value for name, value in given.items() if name not in ("data", "plan_timeout")}
        held = [one.input for one in ALFWorld(**given)._scenarios]
        return kept | {"games": hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()}

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return [scenario for scenario in self._scenarios if scenario.split == split]

    def begin(self, scenario: Scenario) -> str:
        self.game = self.game or Game()
        self.game.begin(self._path(scenario))
        self.said_commands: list[str] = []
        self.over = False
        return self._told()

    def act(self, action: str) -> str:
        if self.over or self.game is None:
            raise Invalid("the episode is over")
        command = " ".join(action[:200].lower().strip(' .!"`').split())
        self.invalid_actions += command not in self.game.state["admissible_commands"]
        self.game.step(command)
        self.said_commands.append(command)
        self.reward += float(self.game.state["won"])
        self.over = self.done = bool(self.game.state["won"]) or len(self.said_commands) >= self.max_steps
        return self._told()

    def outcome(self, answer: str) -> dict[str, Any]:
        won = self.game is not None and bool(self.game.state["won"])
        return {"success": won, "progress": float(won), "steps": len(self.said_commands)}

    def close(self) -> None:
        if self.game is not None:
            self.game.close()
            self.game = None

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """In a game of its own: the episode under way stays as it is."""
        path, game = self._path(scenario), Game()
        try:
            for way in (game.walkthrough, lambda path: planned(path, self.plan_timeout)):
                commands = way(path)
                if commands and game.wins(path, commands):
                    return acts(commands)
        finally:
            game.close()
        raise EnvironmentFailed(f"{scenario.input['game']}: neither its walkthrough nor the planner wins")

    def save(self) -> Any:
        return [self.said_commands, self.invalid_actions]

    def restore(self, scenario: Scenario, state: Any) -> None:
        self.reset(scenario)
        commands, invalid = state
        for command in commands:
            self.act(command)
        self.invalid_actions = invalid

    def _path(self, scenario: Scenario) -> str:
        return str(self.root / GAMES / scenario.input["game"] / "game.tw-pddl")

    def _told(self) -> str:
        assert self.game is not None
        lines = str(self.game.state["feedback"]).split("\n")
        text = "\n".join(line for line in lines if line.strip() and not line.startswith("-="))
        text = text if len(text) <= LONGEST else text[:LONGEST] + " … (cut)"
        if not self.commands or self.over:
            return text
        possible = list(self.game.state["admissible_commands"])
        more = f", and {len(possible) - SHOWN} more" if len(possible) > SHOWN else ""
        return f"{text}\nPossible: {', '.join(possible[:SHOWN])}{more}."


def folder(data: str | None) -> Path:
    """That of ALFWorld's data."""
    return Path(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser().absolute()


def missing(where: Path) -> str:
    return (
        f"environment.data: there is no game in {where}; download ALFWorld's data (pip install alfworld, then "
        "alfworld-download --data-dir DIR), and name its folder: environment.data=DIR, or the variable ALFWORLD_DATA"
    )


@functools.cache
def chosen(root: str, name: str, tasks: tuple[str, ...], most: int | None, seed: int) -> list[tuple[str, str, str]]:
    """Task, place below GAMES and digest of games of a folder: in turn from each task, in an order by the seed, until
    there are enough or none are left. No more files are read than that takes."""
    games = Path(root) / GAMES
    trials = sorted(path.parent.relative_to(games).as_posix() for path in (games / name).glob("*/*/game.tw-pddl"))
    random.Random(f"{seed} {name}").shuffle(trials)
    most = len(trials) if most is None else most
    found: dict[str, list[tuple[str, str, str]]] = {task: [] for task in tasks}
    for trial in trials:
        if all(len(some) * len(tasks) >= most for some in found.values()):
            break
        task = _task(games, trial)
        if task in found and (digest := _digest(games / trial / "game.tw-pddl")):
            found[task].append((task, trial, digest))
    turns = [one for place in range(most) for some in found.values() for one in some[place : place + 1]]
    return turns[:most]


def _task(games: Path, trial: str) -> str:
    """What a trial's file says; nothing where ALFWorld leaves the trial out."""
    file = games / trial / "traj_data.json"
    if "movable" in trial or "Sliced" in trial or not file.is_file():
        return ""
    return str(_read(file, file.read_bytes()).get("task_type"))


def _digest(file: Path) -> str:
    """Of a game that is known to be solvable; nothing of another."""
    data = file.read_bytes()
    return hashlib.sha256(data).hexdigest()[:16] if _read(file, data).get("solvable") else ""


def _read(file: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ResourceError(f"environment.data: {file} is no JSON object; download ALFWorld's data anew")
    return found
