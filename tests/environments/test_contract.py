"""The contract of environments, asked of every built-in one that needs no package, server, sandbox or data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest

from components.environments.adapters import textarena_games
from components.environments.adapters.alfworld import ALFWorld
from components.environments.adapters.babyai import BabyAI
from components.environments.adapters.gym import Gym
from components.environments.adapters.reasoning import ReasoningGym
from components.environments.adapters.scienceworld import ScienceWorld
from components.environments.adapters.textarena import TextArena
from components.environments.adapters.textworld import TextWorld
from components.environments.games.deduction import Deduction
from components.environments.games.game2048 import Game2048
from components.environments.games.guess import Guess
from components.environments.games.maze import Maze
from components.environments.games.textcraft import TextCraft
from components.environments.games.tictactoe import TicTacToe
from components.environments.games.wordle import Wordle
from components.environments.protocol import Environment
from components.environments.service.airline import Airline
from components.environments.service.retail import Retail
from components.environments.worlds.arithmetic import Arithmetic
from components.environments.worlds.calculator import Calculator
from components.environments.worlds.email_search import EmailSearch
from components.environments.worlds.memory import Memory
from components.environments.worlds.questions.movie import Movie
from components.environments.worlds.questions.todo import Todo
from components.environments.worlds.questions.weather import Weather
from components.environments.worlds.shop import Shop
from components.environments.worlds.sql import Sql
from components.environments.worlds.webshop import Webshop
from components.errors import ResourceError
from flows.experiment.config_loader import CONF
from tests.environments import checks

ALL = 10_000
# name: (environment, scenarios of each split to play with actions of any kind, and to solve)
BUILT_IN: dict[str, tuple[Callable[[], Environment], int, int]] = {
    "airline": (partial(Airline, train=36, heldout=18), 18, 18),
    "arithmetic": (partial(Arithmetic, train=24, heldout=12), 6, 6),
    "calculator": (partial(Calculator, train=20, heldout=10), 3, 3),
    "deduction": (Deduction, 5, 5),
    "email_search": (partial(EmailSearch, mails=2500, train=100, heldout=40, train_mailboxes=2), 3, 3),
    "game2048": (Game2048, 3, 3),
    "guess": (Guess, 3, ALL),
    "maze": (Maze, 3, ALL),
    "memory": (Memory, 10, 10),
    "movie": (partial(Movie, train=24, heldout=12), 8, 8),
    "retail": (partial(Retail, train=36, heldout=18), 18, 18),
    "shop": (partial(Shop, train=24, heldout=12), 3, 3),
    "sql": (partial(Sql, train=30, heldout=15), 3, 3),
    "textcraft": (TextCraft, 3, ALL),
    "tictactoe": (TicTacToe, 3, 200),
    "todo": (partial(Todo, train=24, heldout=12), 8, 8),
    "weather": (partial(Weather, train=24, heldout=12), 8, 8),
    "webshop": (partial(Webshop, products=1500, train=60, heldout=20), 3, 3),
    "webshop as text": (partial(Webshop, products=1500, train=60, heldout=20, actions="text"), 3, 3),
    "wordle": (Wordle, 3, 30),
}
ELSEWHERE = {
    "agentgym", "alfworld", "babyai", "dataset", "gym", "mcp", "mixture", "none", "openenv", "python_tool", "reasoning",
    "repair", "scienceworld", "tasks", "tau_bench", "textarena", "textworld", "verifiers",
}  # fmt: skip
"""Environments whose own files ask for the contract, where what they need is installed."""


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_environment_keeps_the_contract(name):
    make, few, solve = BUILT_IN[name]
    checks.check(make, few=few, solve=solve)


def test_every_environment_of_the_configuration_is_asked():
    names = {path.stem for path in (CONF / "environment").glob("*.yaml")}
    assert names == {name.partition(" ")[0] for name in BUILT_IN} | ELSEWHERE


def test_without_its_package_an_environment_says_what_to_install(monkeypatch, subtests):
    textarena_games.load_kind.cache_clear()
    for extra, make, modules in [
        ("alfworld", ALFWorld, {"fast_downward": None, "textworld": sys}),
        ("babyai", BabyAI, {"minigrid": None}),
        ("gym", Gym, {"gymnasium": None}),
        ("reasoning", ReasoningGym, {"reasoning_gym": None}),
        ("scienceworld", ScienceWorld, {"scienceworld": None, "scienceworld.constants": None}),
        ("textarena", TextArena, {"textarena": None}),
        ("textworld", TextWorld, {"textworld": None}),
    ]:
        message = rf"the package {next(iter(modules))}\S* is not installed; run pip install -e '\.\[{extra}\]'"
        with subtests.test(extra), monkeypatch.context() as patch:
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            with pytest.raises(ResourceError, match=message):
                make()
