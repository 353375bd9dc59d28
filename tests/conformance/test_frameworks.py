"""An agent of a framework in a process of its own: captured exactly and trained on. The other agents need packages that
are not in this environment (`python -m tests.conformance.frameworks`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from components.models.weights import prepare
from tests.conformance import frameworks
from tests.conformance.frameworks import AGENTS, ALL, TINY, Agent, case, play, problems, run

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return prepare(TINY, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("package", ["litellm", "anthropic"])
def test_it_streams_and_the_step_trains_on_each_token_once(model_dir, monkeypatch, package):
    """Lost and repeated tokens would be a problem."""
    pytest.importorskip(package)
    played = []
    monkeypatch.setattr(frameworks, "play", lambda *arguments: played.append(play(*arguments)) or played[-1])
    agent = Agent(f"{package}_agent.py", package, ("--stream",))
    result = case(agent, Path(sys.executable), None, model_dir)
    assert result.outcome == "passed", result.reason
    assert result.reason.startswith("6 answers in 2 histories")
    [(engine, trajectories)] = played
    assert problems(engine, trajectories) == ""
    span = next(message.span for message in trajectories[0].histories[0].messages if message.span)
    trajectories[0].histories[0].token_ids[span[0]] += 1
    assert "or other tokens" in problems(engine, trajectories)


def test_every_program_has_a_case():
    programs = {path.name for path in AGENTS.iterdir() if path.suffix in (".py", ".mjs")} - {"task.py", "task.mjs"}
    assert {agent.program for agent in ALL} == programs
    assert len({agent.name for agent in ALL}) == len(ALL) > 20


def test_agents_whose_packages_are_missing_are_skipped_with_a_reason(monkeypatch):
    agents = [Agent("vercel_ai.mjs", "ai"), Agent("smolagents_agent.py", "smolagents")]
    cases = run(agents, Path(sys.executable), None).cases
    assert [case.outcome for case in cases] == ["skipped", "skipped"]
    assert "node_modules/ai" in cases[0].reason
    assert "ModuleNotFoundError: No module named 'smolagents'" in cases[1].reason
