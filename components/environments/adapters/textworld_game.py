"""Generator of one TextWorld game. `textworld.py` runs this script in a subprocess.

    python -P textworld_game.py '{"kind": "quest", "settings": {...}, "seed": 1}' FOLDER/NAME.z8

It writes the game and, beside it, NAME.json with its description. It imports nothing from Espalier.
"""

import importlib
import json
import resource
import sys

MEMORY = 8 << 30
"""Limit of the address space in bytes, including the compiler."""
CPU = 120
"""Limit of CPU time, in seconds."""


def make(kind: str, settings: dict, seed: int, path: str) -> None:
    """Generate and compile a game."""
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
    arguments = json.loads(sys.argv[1])
    make(arguments["kind"], arguments["settings"], arguments["seed"], sys.argv[2])
