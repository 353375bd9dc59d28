"""Makes one TextWorld game: run as a script in a process of its own, by `textworld.py`, which says what it may use.

    python -P textworld_game.py '{"kind": "quest", "settings": {...}, "seed": 1}' FOLDER/NAME.z8

It writes the game and, beside it, NAME.json with what is known of it. It imports nothing of ours.
"""

import importlib
import json
import resource
import sys

MEMORY = 8 << 30
"""Bytes of address space, the compiler's included."""
CPU = 120
"""Seconds."""


def make(kind: str, settings: dict, seed: int, path: str) -> None:
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


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
    given = json.loads(sys.argv[1])
    make(given["kind"], given["settings"], given["seed"], sys.argv[2])
