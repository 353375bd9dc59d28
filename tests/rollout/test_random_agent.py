"""Random actions: legal moves of games, tool calls that fit their schemas, and no more than that."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, create_model

from components.environments.games.deduction import Deduction
from components.environments.games.game2048 import Game2048
from components.environments.games.guess import Guess
from components.environments.games.maze import Maze
from components.environments.games.textcraft import TextCraft
from components.environments.games.tictactoe import TicTacToe
from components.environments.games.wordle import Wordle
from components.environments.tools import ToolEnvironment, tool
from components.environments.worlds.calculator import Calculator
from components.environments.worlds.shop import Shop
from components.errors import SpecError
from components.inference.protocol import ChatRequest, Sampling
from components.rollout.players.player import Player
from components.rollout.random_agent import RandomAgent, RandomEngine, check_random
from components.rollout.request import episode_requests
from components.rollout.spec import EpisodeLimits
from tests.flows.free_text import FreeText
from tests.rollout.worlds import run_episodes

GAMES = [TicTacToe, Game2048, Maze, Guess, Wordle, Deduction, TextCraft]


def play(factory, seed=0, scenarios=6):
    available = factory().scenarios("heldout")[:scenarios]
    requests = episode_requests(available, 1, sampling=Sampling(), max_turns=8, seed=seed)
    return run_episodes(RandomEngine(), factory, requests, EpisodeLimits(), player=Player(RandomAgent(10_000)))


def test_moves_of_games_are_legal():
    for game in GAMES:
        for episode in play(game):
            assert episode.failure is None, game
            assert episode.outcome["invalid_actions"] == 0, game
            assert episode.metrics["turns"] >= 1, game


@pytest.mark.parametrize("environment", [Shop, Calculator])
def test_the_seed_determines_the_actions(environment):
    first, again, other = (play(environment, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    called = {
        call.name for episode in first for message in episode.histories[0].messages for call in message.tool_calls
    }
    assert called


def test_gym_actions_are_named_ones():
    pytest.importorskip("gymnasium")
    from components.environments.adapters.gym import Gym

    episodes = play(Gym)
    assert sum(episode.outcome["invalid_actions"] for episode in episodes) == 0


class Typed(ToolEnvironment):
    """Environment whose only tool takes arguments of every kind."""

    def scenarios(self, split):
        return []

    def begin(self, scenario):
        return "go"

    @tool
    def use(self, size: int, share: float, sure: bool, names: list[str], note: str | None = None) -> str:
        """uses"""
        return "used"

    def outcome(self, answer):
        return {"success": False}


class Part(BaseModel):
    number: int
    label: str


@given(seed=st.integers(0, 10_000))
def test_arguments_fit_their_schema(seed):
    model = create_model("use", size=(int, ...), share=(float, ...), sure=(bool, ...), parts=(list[Part], ...))
    schema = model.model_json_schema()
    offered = [{"type": "function", "function": {"name": "use", "description": "", "parameters": schema}}]
    message = [{"role": "user", "content": "Order 17 of 3.5 kg"}]
    answer = asyncio.run(RandomEngine().chat(ChatRequest(message, offered, seed=seed))).message
    for call in answer.get("tool_calls", []):
        model.model_validate_json(call["function"]["arguments"])
    if "tool_calls" not in answer:
        assert answer["content"] in message[0]["content"]


@given(
    low=st.integers(-50, 50), width=st.integers(0, 40), whole=st.booleans(), exclusive=st.booleans(), seed=st.integers()
)
def test_numbers_stay_within_their_bounds(low, width, whole, exclusive, seed):
    from components.rollout.random_agent import _value

    names = ("exclusiveMinimum", "exclusiveMaximum") if exclusive and whole else ("minimum", "maximum")
    high = low + width + (2 if exclusive and whole else 0)
    schema = {"type": "integer" if whole else "number", names[0]: low, names[1]: high}
    value = _value(random.Random(seed), schema, ["9999"])
    assert low <= value <= high
    if exclusive and whole:
        assert low < value < high


def test_arguments_of_a_tool_environment_are_accepted():
    environment = Typed()
    offered = environment.tools()
    for seed in range(50):
        request = ChatRequest([{"role": "user", "content": "ids 7 and A-9"}], offered, seed=seed)
        for call in asyncio.run(RandomEngine().chat(request)).message.get("tool_calls", []):
            from components.environments.tools import _tools_of

            _tools_of(Typed)["use"].arguments(call["function"]["arguments"])
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_free_text_is_refused():
    environment = FreeText()
    with pytest.raises(SpecError, match="FreeText takes free text and lists no legal actions"):
        asyncio.run(check_random(environment, environment.scenarios("heldout")[0]))
    asyncio.run(check_random(TicTacToe(), TicTacToe().scenarios("heldout")[0]))
