"""Craft an item from raw materials: the agent collects raw items and crafts by recipes that build on each other.

The commands are `get 2 oak log` (raw items only), `craft 4 oak planks using 1 oak log` (a recipe or a multiple of it)
and `inventory`. The first message lists the needed recipes and others that are not needed, shuffled. An episode ends
when the inventory has the requested number of the item.

The recipes are patterns over woods, metals, stones and colours, a few hundred in all. The goals of the two splits are
different items. The outcome's `progress` is the share of the needed kinds of items that have been crafted.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from components.environments.seeded import ALL, GeneratedGame
from components.environments.tools import InvalidAction, acts
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LEVELS = {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}
"""Number of listed recipes that are not needed, by difficulty, which is the depth of the goal's recipe tree."""
MOST = 999
"""Maximum number of one item in the inventory."""
HELDOUT = 4
"""One item in `HELDOUT` of each depth is held out."""

KINDS = {
    "wood": ("oak", "birch", "spruce", "acacia", "cedar", "willow", "maple", "pine"),
    "metal": ("iron", "copper", "silver", "tin", "gold"),
    "stone": ("granite", "basalt", "slate", "marble", "flint"),
    "colour": ("red", "blue", "green", "yellow", "purple", "orange", "black", "white"),
}
PATTERNS = """
4 {wood} planks: 1 {wood} log
6 {wood} slab: 3 {wood} planks
2 {wood} stick: 2 {wood} planks
1 {wood} bowl: 3 {wood} planks
1 {wood} crate: 8 {wood} planks
1 {wood} door: 6 {wood} planks
1 {wood} barrel: 6 {wood} planks, 2 {wood} slab
3 {wood} ladder: 7 {wood} stick
3 {wood} fence: 4 {wood} planks, 2 {wood} stick
1 {wood} gate: 2 {wood} planks, 4 {wood} stick
1 {wood} torch: 1 {wood} stick, 1 coal
1 {wood} fishing rod: 3 {wood} stick, 2 string
1 {wood} bow: 3 {wood} stick, 3 string
4 {wood} arrow: 1 {wood} stick, 1 flint chip, 1 feather
1 {wood} bookcase: 6 {wood} planks, 3 book
1 {wood} cart: 1 {wood} crate, 2 {wood} wheel
1 {wood} wheel: 4 {wood} stick, 1 {wood} planks
1 {wood} stall: 2 {wood} fence, 1 {wood} barrel
1 {wood} wagon: 2 {wood} cart, 1 rope
1 {wood} watchtower: 3 {wood} ladder, 2 {wood} gate
1 {wood} signpost: 1 {wood} gate, 1 lantern
1 {metal} ingot: 1 {metal} ore, 1 coal
9 {metal} nugget: 1 {metal} ingot
1 {metal} block: 9 {metal} ingot
16 {metal} bars: 6 {metal} ingot
1 {metal} bucket: 3 {metal} ingot
1 {metal} chain: 1 {metal} ingot, 2 {metal} nugget
1 {metal} bell: 1 {metal} block, 1 {metal} chain
1 {metal} anvil: 3 {metal} block, 4 {metal} ingot
1 {metal} sword: 2 {metal} ingot, 1 oak stick
1 {metal} pickaxe: 3 {metal} ingot, 2 oak stick
1 {metal} axe: 3 {metal} ingot, 2 birch stick
1 {metal} shears: 2 {metal} ingot
1 {metal} clock: 4 {metal} ingot, 1 gear
1 {metal} lamp: 4 {metal} nugget, 1 glass
1 {metal} belfry: 1 {metal} bell, 2 {metal} bars
1 {metal} tool rack: 1 {metal} pickaxe, 1 {metal} sword, 2 oak slab
1 {metal} smithy: 1 {metal} anvil, 1 {metal} tool rack
4 {stone} bricks: 4 {stone}
6 {stone} wall: 6 {stone} bricks
4 {stone} stairs: 6 {stone} bricks
1 {stone} oven: 8 {stone} bricks, 1 coal
1 {stone} tower: 2 {stone} wall, 2 {stone} stairs
1 {stone} castle: 4 {stone} tower, 1 iron chain
1 {stone} bakery: 1 {stone} oven, 1 oak door
1 {colour} dye: 1 {colour} flower
1 {colour} wool: 1 wool, 1 {colour} dye
3 {colour} carpet: 2 {colour} wool
1 {colour} banner: 6 {colour} wool, 1 oak stick
1 {colour} bed: 3 {colour} wool, 3 oak planks
1 {colour} tent: 4 {colour} carpet, 3 spruce stick
1 {colour} sail: 1 {colour} banner, 2 rope
1 {colour} camp: 2 {colour} tent, 1 campfire
1 {colour} boat: 1 {colour} sail, 1 oak crate
1 {colour} glass: 1 glass, 1 {colour} dye
1 {colour} window: 6 {colour} glass, 2 oak stick
3 paper: 3 reed
1 book: 3 paper, 1 leather
1 rope: 4 string
1 glass: 1 sand
1 gear: 4 iron ingot
1 lantern: 8 iron nugget, 1 oak torch
1 campfire: 3 oak stick, 1 coal
1 flint chip: 1 flint
"""

Items = dict[str, int]
"""Count of each item."""


@dataclass(frozen=True)
class Recipe:
    item: str
    makes: int
    needs: Mapping[str, int]

    def __str__(self) -> str:
        return f"craft {self.makes} {self.item} using {_join_counts(self.needs)}"


@registered("environment.textcraft")
class TextCraft(GeneratedGame):
    """seed: generator seed. train, heldout: scenarios of the two splits. difficulties: used in rotation.

    Scenario types: wood, metal, stone, colour, the kind of the goal. Difficulty: the depth of its recipe tree.
    """

    saved = ("items", "crafted")

    name = "textcraft"
    system = (
        "Craft the item. Give one command, alone: get NUMBER ITEM (of what no recipe makes), craft NUMBER ITEM using "
        "NUMBER ITEM, NUMBER ITEM (as a recipe says, or a multiple), inventory."
    )

    @staticmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        item, kind = rng.choice(_goals(split)[difficulty])
        needed = [name for name in _ingredients(item) if name in recipes()]
        others = sorted(set(recipes()) - set(needed))
        listed = sorted([*needed, *rng.sample(others, LEVELS[difficulty])])
        rng.shuffle(listed)
        return kind, {"item": item, "count": rng.randrange(1, 5), "listed": listed}

    def begin(self, scenario: Scenario) -> str:
        self.items: Items = {}
        self.crafted: set[str] = set()
        self.wanted, self.count = scenario.input["item"], scenario.input["count"]
        self.needed = {recipe.item for recipe, _ in plan(self.wanted, self.count)[1]}
        listed = "\n".join(str(recipes()[item]) for item in scenario.input["listed"])
        return f"Recipes:\n{listed}\n\nGoal: {self.count} {self.wanted}"

    def act(self, action: str) -> str:
        words = " ".join(action.lower().split())
        if words == "inventory":
            return _join_counts(self.items) or "nothing"
        if words.startswith("get "):
            return self._get(words.removeprefix("get "))
        if words.startswith("craft ") and " using " in words:
            product, _, used = words.removeprefix("craft ").partition(" using ")
            return self._craft(product, used)
        raise InvalidAction("a command is get NUMBER ITEM, craft NUMBER ITEM using NUMBER ITEM, ..., or inventory")

    def legal_actions(self) -> list[str]:
        """Return the recipes that the inventory suffices for, one of each raw item, and `inventory`."""
        crafts = [
            str(recipe)
            for recipe in recipes().values()
            if all(self.items.get(item, 0) >= amount for item, amount in recipe.needs.items())
        ]
        return [*crafts, *(f"get 1 {item}" for item in sorted(raw_items())), "inventory"]

    def outcome(self, answer: str) -> dict[str, Any]:
        success = self.items.get(self.wanted, 0) >= self.count
        return {"success": success, "progress": len(self.crafted & self.needed) / len(self.needed)}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        raw, crafts = plan(scenario.input["item"], scenario.input["count"])
        commands = [f"get {count} {item}" for item, count in raw.items()]
        for recipe, times in crafts:
            needs = {item: count * times for item, count in recipe.needs.items()}
            commands.append(f"craft {recipe.makes * times} {recipe.item} using {_join_counts(needs)}")
        return acts(commands)

    def _get(self, text: str) -> str:
        item, count = _parse_count(text)
        if item in recipes():
            raise InvalidAction(f"{item} must be crafted")
        if item not in raw_items():
            raise InvalidAction(f"no item {item}")
        self._add(item, count)
        return f"got {count} {item}"

    def _craft(self, product: str, materials: str) -> str:
        item, count = _parse_count(product)
        parts = [_parse_count(part) for part in materials.split(",")]
        recipe, provided = recipes().get(item), dict(parts)
        if recipe is None:
            raise InvalidAction(f"no recipe makes {item}")
        times, remainder = divmod(count, recipe.makes)
        if (
            remainder
            or len(provided) < len(parts)
            or provided != {name: times * amount for name, amount in recipe.needs.items()}
        ):
            raise InvalidAction(f"that is not the recipe of {item}, nor a multiple of it")
        missing = {name: amount - self.items.get(name, 0) for name, amount in provided.items()}
        if short := {name: amount for name, amount in missing.items() if amount > 0}:
            raise InvalidAction(f"{_join_counts(short)} lacking")
        self._add(item, count)
        for name, amount in provided.items():
            self.items[name] -= amount
        self.items = {name: amount for name, amount in self.items.items() if amount}
        self.crafted.add(item)
        self.done = self.items.get(self.wanted, 0) >= self.count
        return f"crafted {count} {item}"

    def _add(self, item: str, count: int) -> None:
        if self.items.get(item, 0) + count > MOST:
            raise InvalidAction(f"there is room for {MOST} {item}")
        self.items[item] = self.items.get(item, 0) + count


def plan(item: str, count: int) -> tuple[Items, list[tuple[Recipe, int]]]:
    """Return the raw items to collect by count, and the recipes with their number of crafts, ingredients first."""
    wanted, crafts, raw = Counter({item: count}), [], Items()
    for name in sorted(_ingredients(item), key=lambda name_: (-depth(name_), name_)):
        recipe = recipes().get(name)
        if recipe is None:
            raw[name] = wanted[name]
            continue
        times = -(-wanted[name] // recipe.makes)
        crafts.append((recipe, times))
        for part, amount in recipe.needs.items():
            wanted[part] += amount * times
    return raw, crafts[::-1]


@functools.cache
def recipes() -> dict[str, Recipe]:
    """Return the recipes by the item that they make."""
    by_item: dict[str, Recipe] = {}
    for pattern in PATTERNS.strip().splitlines():
        kind = _kind_of(pattern)
        for name in KINDS.get(kind, ("",)):
            product, _, needs = pattern.replace(f"{{{kind}}}", name).partition(": ")
            item, makes = _parse_count(product)
            by_item[item] = Recipe(item, makes, dict(_parse_count(part) for part in needs.split(",")))
    return by_item


@functools.cache
def raw_items() -> set[str]:
    """Return the items that no recipe makes."""
    return {part for recipe in recipes().values() for part in recipe.needs} - set(recipes())


@functools.cache
def depth(item: str) -> int:
    """Return the depth of an item's recipe tree: 0 for a raw item, 1 for an item made of raw items."""
    recipe = recipes().get(item)
    return 1 + max(depth(part) for part in recipe.needs) if recipe else 0


def _ingredients(item: str) -> set[str]:
    """Return an item and all of its direct and indirect ingredients."""
    recipe = recipes().get(item)
    return {item}.union(*(_ingredients(part) for part in recipe.needs)) if recipe else {item}


@functools.cache
def _goals(split: str) -> dict[int, list[tuple[str, str]]]:
    """Return the goals of a split by depth, each with its kind. The split does not depend on the seed."""
    by_depth: dict[int, list[tuple[str, str]]] = {level: [] for level in ALL}
    for pattern in PATTERNS.strip().splitlines():
        kind = _kind_of(pattern)
        for name in KINDS.get(kind, ()):
            item, _ = _parse_count(pattern.replace(f"{{{kind}}}", name).partition(": ")[0])
            by_depth[depth(item)].append((item, kind))
    rng = random.Random("textcraft goals")
    for goals in by_depth.values():
        rng.shuffle(goals)
    return {
        level: [goal for number, goal in enumerate(goals) if (number % HELDOUT == 0) == (split == "heldout")]
        for level, goals in by_depth.items()
    }


def _kind_of(pattern: str) -> str:
    match = re.search(r"\{(\w+)\}", pattern)
    return match[1] if match else ""


def _parse_count(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"([1-9][0-9]{0,2}) ([a-z ]{1,40})", text.strip())
    if not match:
        raise InvalidAction(f"expected NUMBER ITEM, found {text.strip()[:60]!r}")
    return match[2], int(match[1])


def _join_counts(items: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {item}" for item, count in items.items())
