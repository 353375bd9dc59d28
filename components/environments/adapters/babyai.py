"""BabyAI: an agent in a grid world of rooms, doors, keys, balls and boxes follows a mission in words. The levels are
those of the package minigrid, with text observations.

The agent sees the 7 by 7 cells in front of it, described relative to its position and direction. Its actions are
`turn left`, `turn right`, `go forward` (or `go forward 3`), `pick up`, `drop` and `toggle` (opens doors and boxes).
minigrid's bot is the solver; it fails on a few missions and does not support some levels (`BOT_UNSUPPORTED`).

A scenario is a level and a seed, so the saved state is the list of actions.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field

from components.environments.optional_packages import import_optional
from components.environments.restorable import RestorableActions
from components.environments.seeded import Count, scenario_numbers
from components.environments.tools import InvalidAction, acts
from components.errors import Problem, SpecError
from components.specs.base import nearest
from components.specs.registered import registered
from components.trajectories.schema import Scenario

SYSTEM = """You act in a world of rooms. Fulfil your mission. You see only what lies before you, up to 6 cells ahead \
and 3 to each side. A thing that you pick up or toggle (open, unlock with a key of its color) must be right in front \
of you. Each turn, one action: turn left, turn right, go forward, go forward N, pick up, drop, toggle."""

ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle")
"""Action names, indexed by minigrid's action numbers."""
FORWARD = re.compile(r"go forward(?: (\d{1,2}))?(?: (?:steps?|cells?))?")
LEVEL = re.compile(r"BabyAI-(\w+)-v(\d+)")
BOT_UNSUPPORTED = ("PutNextS5N2Carrying", "PutNextS6N3Carrying", "PutNextS7N4Carrying", "KeyInBox")
"""Levels that minigrid's bot does not support."""

_KINDS = {
    1: "GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObj GoToLocal GoToRedBlueBall GoToDoor",
    2: "GoToObjDoor OpenRedDoor OpenDoor PickupDist PickupLoc ActionObjDoor UnlockLocal OneRoomS8",
    3: "OpenTwoDoors OpenDoorsOrder PutNextLocal PutNext Unlock UnlockPickup GoTo PickupAbove",
    4: "Open Pickup UnblockPickup BlockedUnlockPickup UnlockToUnlock KeyInBox KeyCorridor FindObjS5 MoveTwoAcross "
    "GoToImpUnlock",
    5: "GoToSeq Synth SynthLoc SynthSeq MiniBossLevel BossLevel BossLevelNoUnlock",
}
DIFFICULTY = {kind: difficulty for difficulty, kinds in _KINDS.items() for kind in kinds.split()}
"""Difficulty by kind of level; sizes such as GoToLocalS8N7 belong to the same kind."""


@registered("environment.babyai")
class BabyAI(RestorableActions):
    """A mix of BabyAI levels.

    Scenario types: the levels. Difficulty: 1 one object in one room; 2 pick up or open in one room, or find the right
    object; 3 two steps or many rooms; 4 obstacles must be removed; 5 several missions in many rooms.

    Args:
        levels: Names of levels without `BabyAI-` and version, in equal proportions.
        seed: Seed of the scenarios.
        train, heldout: Number of scenarios of the split.
        max_steps: Maximum number of steps of an episode; null takes the limit of the level, which is high.
    """

    def __init__(
        self,
        levels: Sequence[str] = ("GoToRedBallGrey", "GoToLocal", "PickupLoc", "OpenDoor", "PutNextLocal"),
        seed: int = 0,
        train: Count = 512,
        heldout: Count = 128,
        max_steps: Annotated[int, Field(ge=1)] | None = None,
    ):
        self.registered_levels = _levels()
        problems = [] if levels else [Problem("environment.levels", "is empty; expected at least one level")]
        for name in levels:
            if name not in self.registered_levels:
                message = f"minigrid has no BabyAI level {name!r}; it has {len(self.registered_levels)}"
                problems.append(Problem("environment.levels", message, nearest(name, self.registered_levels)))
        if problems:
            raise SpecError(problems)
        self.levels, self.seed, self.max_steps = levels, seed, max_steps
        self.counts = {"heldout": heldout, "train": train}
        self.worlds: dict[str, Any] = {}
        self.system = SYSTEM

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return [
            self._scenario(split, self.levels[index % len(self.levels)], self.seed * 1_000_003 + number)
            for index, number in enumerate(scenario_numbers(self.counts, split))
        ]

    def begin(self, scenario: Scenario) -> str:
        self.world = self._world(scenario)
        with contextlib.redirect_stdout(io.StringIO()):  # minigrid prints when it redraws a mission
            self.world.reset(seed=scenario.input["seed"])
        self.won = False
        return f"Mission: {self.world.mission}.\n{describe_view(self.world)}"

    def act(self, action: str) -> str:
        move, repeats = _parse(action)
        for step in range(repeats):
            position = tuple(self.world.agent_pos)
            _, reward, terminated, truncated, _ = self.world.step(move)
            self.action_log.append(move)
            self.reward += float(reward)
            self.won = bool(terminated) and reward > 0
            self.done = bool(terminated or truncated)
            if self.done:
                break
            if move == ACTIONS.index("go forward") and tuple(self.world.agent_pos) == position:
                return f"Something is in the way after {step} steps.\n{describe_view(self.world)}"
        if self.done:
            return "Mission fulfilled." if self.won else "Out of time, or against the mission's order."
        return describe_view(self.world)

    def legal_actions(self) -> list[str]:
        return list(ACTIONS)

    def outcome(self, answer: str) -> dict[str, Any]:
        return {"success": self.won, "steps": len(self.action_log)}

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()
        self.worlds = {}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the actions of minigrid's bot. Raises SpecError for levels that it does not support."""
        if scenario.type in BOT_UNSUPPORTED:
            message = f"minigrid's bot does not support {scenario.type}; remove it, or set warmup=none"
            raise SpecError.at("environment.levels", message)
        bots = import_optional("minigrid.utils.baby_ai_bot", "babyai")
        world = self._world(scenario, new=True)
        with contextlib.redirect_stdout(io.StringIO()):
            world.reset(seed=scenario.input["seed"])
        bot = bots.BabyAIBot(world)
        moves: list[int] = []
        move = None
        with contextlib.suppress(AssertionError, IndexError, bots.DisappearedBoxError):  # raised when the bot fails
            while len(moves) < world.max_steps:
                move = int(bot.replan(move))
                if move >= len(ACTIONS):
                    break
                moves.append(move)
                if world.step(move)[2]:
                    break
        world.close()
        return acts(_action_texts(moves) or [ACTIONS[0]])

    def repeat(self, action: Any) -> None:
        self.act(ACTIONS[action])

    def _scenario(self, split: str, level: str, seed: int) -> Scenario:
        difficulty = DIFFICULTY.get(self.registered_levels[level][1], 0)
        return Scenario(f"{level}-{seed}", {"level": level, "seed": seed}, split, level, difficulty)

    def _world(self, scenario: Scenario, new: bool = False) -> Any:
        level = scenario.input["level"]
        if new or level not in self.worlds:
            options = {} if self.max_steps is None else {"max_steps": self.max_steps}
            gymnasium = import_optional("gymnasium", "babyai")
            world = gymnasium.make(self.registered_levels[level][0], disable_env_checker=True, **options).unwrapped
            if new:
                return world
            self.worlds[level] = world
        return self.worlds[level]


def describe_view(world: Any) -> str:
    """Return the view of the agent in words."""
    names = import_optional("minigrid.core.constants", "babyai")
    view = world.gen_obs()["image"]
    middle, last = view.shape[0] // 2, view.shape[1] - 1

    def kind(side: int, ahead: int) -> str:
        inside = 0 <= middle + side < view.shape[0] and 0 <= last - ahead <= last
        return names.IDX_TO_OBJECT[int(view[middle + side, last - ahead, 0])] if inside else "unseen"

    objects = []
    for side in range(-middle, middle + 1):
        for ahead in range(last + 1):
            if (side, ahead) == (0, 0) or kind(side, ahead) in ("unseen", "empty", "floor", "wall"):
                continue
            _, color, state = (int(number) for number in view[middle + side, last - ahead])
            name = f"{names.IDX_TO_COLOR[color]} {kind(side, ahead)}"
            if kind(side, ahead) == "door":
                name = f"{('open', 'closed', 'locked')[state]} {name}"
            objects.append((ahead + abs(side), side, f"{_article(name)} {_where(side, ahead)}"))
    words = [f"You see {', '.join(text for _, _, text in sorted(objects))}." if objects else "You see no things."]
    walls = []
    for text, cells in (
        ("ahead", [(0, number) for number in range(1, last + 1)]),
        ("left", [(-number, 0) for number in range(1, middle + 1)]),
        ("right", [(number, 0) for number in range(1, middle + 1)]),
    ):
        distance = next((number for number, cell in enumerate(cells, 1) if kind(*cell) == "wall"), None)
        if distance:
            walls.append(f"{distance} {text}")
    if walls:
        words.append(f"Walls: {', '.join(walls)}.")
    if world.carrying is not None:
        words.append(f"You carry {_article(f'{world.carrying.color} {world.carrying.type}')}.")
    return " ".join(words)


def _where(side: int, ahead: int) -> str:
    if (side, ahead) == (0, 1):
        return "right in front of you"
    sideways = f"{abs(side)} {'left' if side < 0 else 'right'}" if side else ""
    return " and ".join(part for part in (f"{ahead} ahead" if ahead else "", sideways) if part)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _parse(action: str) -> tuple[int, int]:
    """Return the number of the action and its repetitions. Raises InvalidAction."""
    text = " ".join(action[:100].lower().strip(" .!\"'`").split())
    if text in ACTIONS:
        return ACTIONS.index(text), 1
    if (forward := FORWARD.fullmatch(text)) and forward[1] and int(forward[1]) > 0:
        return ACTIONS.index("go forward"), int(forward[1])
    raise InvalidAction(f"no action {action[:60]!r}; there are {', '.join(ACTIONS)}")


def _action_texts(moves: Sequence[int]) -> list[str]:
    """Return the action texts of moves; consecutive forward moves are merged."""
    texts: list[str] = []
    for move, run in groupby(moves):
        repeats = len(list(run))
        if ACTIONS[move] == "go forward" and repeats > 1:
            texts.append(f"go forward {repeats}")
        else:
            texts += [ACTIONS[move]] * repeats
    return texts


def _levels() -> dict[str, tuple[str, str]]:
    """Return the registered id and the kind of each level, by short name."""
    import_optional("minigrid", "babyai")  # the import registers the levels
    levels = {}
    for name, spec in import_optional("gymnasium", "babyai").registry.items():
        if match := LEVEL.fullmatch(name):
            levels[match[1]] = (name, str(spec.entry_point).rpartition(":")[2])
    return levels
