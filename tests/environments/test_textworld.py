"""TextWorld: cached, bounded game generation and single commands."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from components.environments.adapters.textworld import TextWorld
from components.environments.tools import acts
from components.errors import EnvironmentFailed
from tests.environments import checks

pytestmark = pytest.mark.timeout(1800)  # seconds; a game takes some to make, many on a busy machine


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Folder of generated games, shared by all tests."""
    return str(tmp_path_factory.mktemp("games"))


def small(cache, **arguments) -> TextWorld:
    pytest.importorskip("textworld")
    options = {"kinds": ["quest", "cooking"], "difficulties": [1], "train": 2, "heldout": 2, "cache": cache}
    return TextWorld(**{**options, **arguments})


def test_it_satisfies_the_environment_contract(cache):
    checks.check(lambda: small(cache), few=2)


def test_walkthroughs_win_and_lengthen_with_difficulty(cache):
    kinds = ["quest", "coin_collector"]
    environment = small(cache, kinds=kinds, difficulties=[1, 3], train=4)
    lengths = {}
    for scenario in environment.scenarios("train"):
        assert checks.solved(environment, scenario), scenario.id
        lengths[scenario.type, scenario.difficulty] = len(environment.solve(scenario))
    for kind in kinds:
        assert lengths[kind, 1] < lengths[kind, 3]
    environment.close()


def test_observations_have_no_status_line(cache):
    """The interpreter ends each text with the prompt, spaces, the room and the score."""
    environment = small(cache, kinds=["cooking"])
    scenario = environment.scenarios("train")[0]
    observations = [environment.reset(scenario)[-1]["content"]]
    observations += [environment.act(command) for command in ("look", "examine cookbook")]
    environment.close()
    for observation in observations:
        assert "  " not in observation
        assert observation.count("-=") <= 1, observation  # the heading of the room
        text, _, possible = observation.partition("\nPossible: ")
        assert possible
        assert not text.endswith(("0/1", "0/2", ">"))


def test_random_actions_do_not_win(cache):
    environment = small(cache, kinds=["coin_collector"], difficulties=[3], train=2)
    assert environment.blocking

    def policy(rng, messages):
        possible = messages[-1]["content"].rpartition("Possible: ")[2].rstrip(".").split(", ")
        return acts([rng.choice(possible)])[0]

    assert checks.success_of(environment, environment.scenarios("train"), policy, turns=6) == 0


def test_concurrent_resets(cache):
    """Instances run in threads, as in the collector."""
    environments = [small(cache) for _ in range(4)]
    scenarios = environments[0].scenarios("train")
    for scenario in scenarios:
        environments[0].reset(scenario)  # makes the game
    with ThreadPoolExecutor(4) as pool:
        observations = list(
            pool.map(lambda environment: [environment.reset(scenario) for scenario in scenarios], environments)
        )
    assert all(observation == observations[0] for observation in observations)
    for environment in environments:
        environment.close()


def test_games_are_generated_once(cache, monkeypatch):
    environment = small(cache)
    scenario = environment.scenarios("train")[0]
    environment.reset(scenario)
    monkeypatch.setattr(TextWorld, "_generate", lambda *_: pytest.fail("made again"))
    other = small(cache)
    assert other.reset(scenario)[1] == environment.reset(scenario)[1]


def test_possible_commands_are_optional(cache):
    shown, hidden = small(cache), small(cache, commands=False)
    scenario = shown.scenarios("train")[0]
    first = shown.reset(scenario)[1]["content"]
    assert "\nPossible: " in first
    assert "$$$" not in first
    assert first.rpartition("\nPossible: ")[0] == hidden.reset(scenario)[1]["content"]


def test_only_single_game_commands_are_accepted(cache, subtests):
    for command in [
        "",
        "save",
        "quit",
        "restart",
        "transcript",
        "look. look",
        "look then look",
        "look, look",
        "look\nquit; look",
        "look " * 1000,
        "tw-print state",
        "\x00look",
    ]:
        with subtests.test(command=command[:60]):
            environment = small(cache)
            steps = checks.play(environment, environment.scenarios("train")[0], acts([command]))
            assert steps[-1].observation[0]["content"].startswith("error: say one command")
            assert steps[-1].info["invalid_actions"] == 1
            assert steps[-1].info["steps"] == 0


def test_impossible_commands_are_answered_by_the_game(cache):
    environment = small(cache)
    step = checks.play(environment, environment.scenarios("train")[0], acts(["take moon", "Look."]))
    assert not step[0].observation[0]["content"].startswith("error: ")
    assert [result.info["invalid_actions"] for result in step] == [1, 1]


def test_episode_ends_after_max_steps(cache):
    environment = small(cache, max_steps=2)
    steps = checks.play(environment, environment.scenarios("train")[0], acts(["look"] * 5))
    assert len(steps) == 2
    assert steps[-1].done


def test_game_generation_times_out(tmp_path):
    environment = small(str(tmp_path), make_timeout=0.01)
    with pytest.raises(EnvironmentFailed, match=r"timed out after 0\.01 s"):
        environment.reset(environment.scenarios("train")[0])
    assert list(tmp_path.iterdir()) == []


def test_cache_folder_is_not_in_the_stage_key(cache):
    options = TextWorld.key_arguments({"cache": "/x", "make_timeout": 1.0, "seed": 3})
    assert options == {"seed": 3}
