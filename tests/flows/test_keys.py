"""What a run lacks is said before it begins: by the command, for a sweep, and whoever asks."""

from __future__ import annotations

import pytest

from flows.experiment.compose import check
from flows.experiment.prerequisites import lacking

ASKS = ["+experiment=smoke", "reward=ruler", "reward.model.model=judge", "reward.model.url=http://127.0.0.1:9/v1"]
NESTED = (
    "reward.independent={_target_: components.rewards.judges.ruler.Ruler, "
    "model: {name: served, url: 'http://127.0.0.1:9/v1', "
    "model: other, key_variable: OTHER_KEY}}"
)
LITELLM = ["+experiment=smoke", "reward=ruler", "judge_model@reward.model=litellm"]

pytestmark = pytest.mark.timeout(1800)  # where its files are not in memory, LiteLLM alone takes a minute to import


@pytest.fixture(autouse=True)
def _none(monkeypatch):
    for name in ("JUDGE_KEY", "OTHER_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_the_key_of_a_judge_is_named_before_anything_is_made(tmp_path, refused):
    said = refused(*ASKS, "reward.model.key_variable=NO_SUCH_KEY", f"root={tmp_path / 'root'}")
    assert said.splitlines() == [
        "reward.model.key_variable: the environment variable NO_SUCH_KEY is not set; set it to the key of "
        "http://127.0.0.1:9/v1"
    ]
    assert not (tmp_path / "root").exists()


def test_that_of_a_provider_is_named_as_litellm_names_it(tmp_path, refused):
    line = [*LITELLM, "reward.model.model=openai/gpt-4.1-mini", f"root={tmp_path / 'root'}"]
    assert "the environment lacks OPENAI_API_KEY; set it" in refused(*line)
    assert "variable JUDGE_KEY is not set" in refused(*line, "reward.model.key_variable=JUDGE_KEY")
    assert not (tmp_path / "root").exists()


def test_all_that_is_missing_is_said_at_once_that_of_a_judge_inside_of_another_reward_too(tmp_path, refused):
    said = refused(*ASKS, NESTED, "reward.model.key_variable=JUDGE_KEY", f"root={tmp_path / 'root'}")
    assert [word in said for word in ("JUDGE_KEY is not set", "OTHER_KEY is not set")] == [True, True]


def test_a_sweep_does_not_begin_where_one_of_its_points_lacks_a_key(tmp_path, refused, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "x")
    points = "reward.model.key_variable=JUDGE_KEY,OTHER_KEY"
    said = refused("-m", *ASKS, points, f"root={tmp_path / 'root'}")
    assert said.count("is not set") == 1
    assert "OTHER_KEY" in said
    assert not (tmp_path / "root").exists()


def test_a_budget_needs_a_price_that_litellm_knows(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")

    def of(*more):
        return list(lacking(check([*LITELLM, "judge.budget=1", *more])[0]))

    assert of("reward.model.model=openai/gpt-4.1-mini") == []
    (text,) = of("reward.model.model=openai/unheard-of")
    assert "judge.budget=1 cannot be enforced: LiteLLM has no price for openai/unheard-of" in text
    assert of("reward.model.model=openai/unheard-of", "reward.model.price={input: 1, output: 2}") == []


def test_a_budget_needs_a_price_of_a_server(refused):
    said = refused(*ASKS, "judge.budget=0.5")
    assert "judge.budget: 0.5 cannot be enforced: the price of judge is not set" in said
    check([*ASKS, "judge.budget=0.5", "reward.model.price={input: 1, output: 2}"])


def test_batches_need_as_many_questions_at_once_as_a_stage_has(refused):
    line = [*ASKS, "reward.model.batch=true", "collect.scenarios=40"]
    said = refused(*line)
    assert "judge.concurrency: 16: limits a batch to this many groups" in said
    assert "expected at least 40" in said
    check([*line, "judge.concurrency=40"])
    said = refused(*line, "judge.concurrency=40", "reward.model.requests_per_minute=5")
    assert "reward.model.requests_per_minute: 5: does not apply to batches" in said
