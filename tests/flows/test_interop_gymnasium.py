"""Environments as Gymnasium environments: the package's checker, rewards, seeds, ends, errors."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("gymnasium")
import gymnasium

from flows.interop.gymnasium import UnicodeText, make
from tests.conformance.gymnasium_environment import ID, check, play
from tests.conformance.reference_episodes import BUILT_IN, overrides_of, reference
from tests.flows.malformed_bodies import malformed_bodies

QUICK = ("shop", "maze", "memory", "mixture")


def test_the_checker_of_gymnasium_passes():
    assert {name: check(name) for name in QUICK} == dict.fromkeys(QUICK, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - set(QUICK)))
def test_the_checker_of_gymnasium_passes_for_every_built_in_environment(name):
    assert check(name) == ""


def test_episodes_have_the_observations_and_rewards_of_the_environment():
    for name in ("shop", "maze", "game2048"):
        with contextlib.closing(make(*overrides_of(name))) as environment:
            assert [play(environment, episode) for episode in reference(name)] == [""] * 4, name


@pytest.fixture
def guess():
    environment = make("environment=guess", "agent.max_turns=2", render_mode="ansi")
    yield environment
    environment.close()


def test_seeds_are_scenarios_and_options_choose_by_id(guess):
    ids = [guess.reset(seed=seed)[1]["scenario"] for seed in (0, 1, 513)]
    assert ids == ["guess-train-0-0", "guess-train-0-1", "guess-train-0-1"]
    assert guess.reset(options={"scenario": "guess-train-0-3"})[1]["scenario"] == "guess-train-0-3"
    drawn = [guess.reset(seed=5), guess.reset(), guess.reset(seed=5), guess.reset()]
    assert drawn[1][1] == drawn[3][1]  # scenarios without a seed follow the last seed


def test_an_episode_that_reaches_max_turns_is_truncated(guess):
    guess.reset(seed=1)
    first, second = guess.step("nonsense"), guess.step("nonsense")
    assert [first[2:4], second[2:4]] == [(False, False), (False, True)]
    assert second[1] == 0.0
    assert guess.render().count("assistant: nonsense") == 2


def test_errors_are_those_of_gymnasium(guess):
    with pytest.raises(gymnasium.error.ResetNeeded, match="step before reset"):
        guess.step("3")
    guess.reset(seed=0)
    with pytest.raises(gymnasium.error.InvalidAction, match="action = 3: expected text"):
        guess.step(3)
    with pytest.raises(gymnasium.error.InvalidAction, match="at most 10000 characters"):
        guess.step("a" * 10_001)
    with pytest.raises(gymnasium.error.Error, match="guess has no such scenario"):
        guess.reset(options={"scenario": "guess-9"})
    with pytest.raises(gymnasium.error.Error, match="'scenari' is unknown; expected scenario"):
        guess.reset(options={"scenari": "x"})
    guess.reset(seed=0)
    for _ in range(2):
        guess.step("x")
    with pytest.raises(gymnasium.error.ResetNeeded, match="after the end"):
        guess.step("x")


def test_an_invalid_message_with_tool_calls_is_an_invalid_action():
    shop = make("environment=shop")
    shop.reset(seed=0)
    with pytest.raises(gymnasium.error.InvalidAction, match=r"tool_calls\[0\]"):
        shop.step('{"role": "assistant", "tool_calls": [{}]}')
    shop.close()


def test_vector_environments_step_together():
    vector = gymnasium.make_vec(ID, num_envs=2, overrides=["environment=guess"])
    observations, _ = vector.reset(seed=[0, 1])
    assert len(observations) == 2
    _, rewards, terminated, truncated, _ = vector.step(("a", "b"))
    assert (list(rewards), list(terminated), list(truncated)) == ([0.0, 0.0], [False, False], [False, False])
    vector.close()


def test_samples_of_the_text_space_are_in_it():
    space = UnicodeText(20, seed=1)
    assert all(space.sample() in space for _ in range(50))
    assert "é€" in space
    assert "x" * 21 not in space
    assert 3 not in space


def test_a_malformed_action_is_a_message_or_an_invalid_action():
    bodies = malformed_bodies({"name": "find_order", "arguments": {"order": "A"}})
    calls = malformed_bodies({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "x"}}]})
    env = make("environment=shop")
    try:
        for body in (*bodies, *calls):
            env.reset(seed=0)
            with contextlib.suppress(gymnasium.error.InvalidAction):
                env.step(body.decode("utf-8", "surrogatepass" if b"\xed" in body else "replace"))
    finally:
        env.close()
