"""Generator of one TextWorld game, which `textworld.py` runs in a child process."""

from __future__ import annotations

import importlib
import os
from typing import Any


def make(kind: str, settings: dict[str, Any], seed: int, path: str) -> None:
    """Generate and compile a game; write it to `path`, and its description beside it with the suffix `.json`."""
    os.chdir(os.path.dirname(path))  # the compiler writes temporary files
    textworld = importlib.import_module("textworld")
    challenges = importlib.import_module("textworld.challenges").CHALLENGES

    options = textworld.GameOptions()
    options.seeds = seed
    options.path = path
    if kind == "quest":
        options.nb_rooms, options.nb_objects = settings["rooms"], settings["objects"]
        options.quest_length, options.quest_breadth = settings["length"], 1
        game = textworld.generator.make_game(options)
    else:
        game = challenges[f"tw-{kind}"][1](settings, options)
    textworld.generator.compile_game(game, options)
