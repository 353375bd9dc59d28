"""The agent in another process that docs/guides/own_agent.md shows plays episodes as it stands there."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from components.inference.app import AppOptions
from components.inference.server import ModelServer
from components.rollout.own_agent import MODEL, OwnAgent
from components.rollout.players.player import Player
from components.trajectories.schema import Scenario
from tests.rollout.worlds import Echo, Parrot, collect

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "own_agent.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("### An agent in another process\n")[2].partition("\n### ")[0]

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed (Node.js 20 or later)")


@pytest.fixture
def agent(tmp_path):
    """The function of the page, with its program beside it."""
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", SECTION, re.DOTALL))
    (tmp_path / "agent.mjs").write_text(blocks["javascript"])
    (tmp_path / "agent.py").write_text(blocks["python"])
    spec = importlib.util.spec_from_file_location("agent_of_the_page", tmp_path / "agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.play


def play(agent, engine, tasks, **options):
    engines: dict = {}
    scenarios = [Scenario(f"s{index}", task, "train") for index, task in enumerate(tasks)]
    with ModelServer(engine, MODEL, AppOptions(engines=engines, timeout=600)) as server:
        player = Player(OwnAgent(agent, server.url, engines))
        return collect(engine, Echo, scenarios, player=player, group_size=1, timeout=600.0, **options)


def test_the_example_plays_episodes(agent):
    tasks = [{"question": "What is in box 7?", "answer": "7"}, {"question": "What is in box 8?", "answer": "no"}]
    found = play(agent, Parrot(), tasks)
    assert [one.failure for one in found] == [None, None]
    for one in found:
        (history,) = one.histories
        assert [message.role for message in history.messages] == ["user", "assistant", "user", "assistant"]
        said = [history.token_ids[slice(*message.span)] for message in history.messages if message.span]
        assert "".join(map(chr, said[1])) == one.outcome["answer"] == history.messages[-1].content
        assert one.metrics["turns"] == 2


def test_its_outcome_is_that_of_the_program(agent):
    answer = play(agent, Parrot(), [{"question": "What is in box 7?", "answer": ""}])[0].outcome["answer"]
    (found,) = play(agent, Parrot(), [{"question": "What is in box 7?", "answer": answer.strip()}])
    assert found.success


def test_a_program_that_fails_says_why(agent):
    (found,) = play(agent, Parrot(), [{"answer": "7"}], max_failures=1)
    assert found.failure is not None
    assert re.match(r"CalledProcessError: node: exit code 1: Error: status 400: ", found.failure.message)


def test_a_program_that_has_used_up_its_calls_is_at_its_end(agent):
    (found,) = play(agent, Parrot(), [{"question": "What is in box 7?", "answer": "7"}], max_turns=1)
    assert (found.failure, found.metrics["turns"], found.outcome) == (None, 1, {})
