"""Aggregation of several sources of a judgement."""

from __future__ import annotations

import asyncio
import json

import pytest

from components.errors import SpecError
from components.rewards.composition.aggregated import Aggregated
from components.rewards.judge import judge
from components.rewards.rules.outcome import Outcome
from components.specs import Target, validate
from components.trajectories.feedback import append
from components.trajectories.schema import Score
from components.trajectories.store import write_trajectories
from flows.stages.base import Context, Request
from flows.stages.execute import run_stage
from tests.trajectories.builders import FAILURE, episode
from tests.trajectories.said import rated

GOOD, BAD = episode("s", 0, success=True), episode("s", 1, success=False)


def raises(trajectory):
    raise ValueError("broken")


async def waits(trajectory):
    await asyncio.sleep(0.01)
    return 0.5


class Given:
    def __init__(self, *values, cost=0.0):
        self.values, self.cost = values, cost

    def score_group(self, group):
        return [
            Score(trajectory.id, value, cost=self.cost) for trajectory, value in zip(group, self.values, strict=True)
        ]


def test_the_weighted_mean_of_those_that_have_scored():
    reward = Aggregated({"env": Outcome(), "human": Given(0.25, 0.5)}, {"human": 3.0})
    assert [score.reward for score in judge(reward, [GOOD, BAD])] == [(1 + 3 * 0.25) / 4, (0 + 3 * 0.5) / 4]


def test_who_has_not_scored_an_episode_does_not_count_in_it():
    class Some(Given):
        def score_group(self, group):
            return [Score(group[0].id, 0.0), Score(group[1].id, None, failure=FAILURE)]

    scores = list(judge(Aggregated({"env": Outcome(), "human": Some()}), [GOOD, BAD]))
    assert [score.reward for score in scores] == [0.5, 0.0]
    assert [sorted(score.components) for score in scores] == [["env", "human"], ["env"]]


def test_a_source_that_breaks_is_named_and_leaves_the_rest():
    (score,) = judge(Aggregated({"env": Outcome(), "broken": raises}), [GOOD])
    assert (score.reward, score.failure) == (1.0, None)
    assert score.explanation.startswith("broken: unscored: ValueError: broken (tests/rewards/test_aggregated.py:")
    (score,) = judge(Aggregated({"broken": raises}), [GOOD])
    assert (score.reward, score.failure.kind) == (None, "ValueError")


def test_a_source_of_weight_0_is_compared_only():
    scores = list(judge(Aggregated({"env": Outcome(), "other": Given(0.0, 1.0)}, {"other": 0.0}), [GOOD, BAD]))
    assert [score.reward for score in scores] == [1.0, 0.0]
    assert [score.components["other"] for score in scores] == [0.0, 1.0]


def test_sources_that_wait_are_asked_at_the_same_time():
    scores = list(judge(Aggregated({"env": Outcome(), "slow": waits}), [GOOD, BAD], concurrency=4))
    assert [score.reward for score in scores] == [0.75, 0.25]


def test_costs_add_up_and_an_unknown_one_makes_the_sum_unknown():
    (score,) = judge(Aggregated({"a": Given(1.0, cost=0.25), "b": Given(1.0, cost=0.5)}), [GOOD])
    assert score.cost == 0.75
    (score,) = judge(Aggregated({"a": Given(1.0, cost=0.25), "b": Given(1.0, cost=None)}), [GOOD])
    assert score.cost is None


def test_failed_episodes_are_shown_to_no_source():
    failed = episode("s", 2, failure=FAILURE)
    scores = list(judge(Aggregated({"env": Outcome(), "given": Given(1.0)}), [GOOD, failed]))
    assert [score.reward for score in scores] == [1.0, None]


def test_weights_must_match_the_sources(subtests):
    for arguments, words in [
        ({"weights": {"humans": 1.0}}, "reward.weights.humans: there is no such source; there are env"),
        ({"weights": {"env": -1.0}}, "reward.weights.env: -1: expected at least 0"),
        ({"weights": {"env": 0.0}}, "reward.sources: no source has a weight above 0"),
    ]:
        with subtests.test(words=words):
            with pytest.raises(SpecError) as caught:
                Aggregated({"env": Outcome()}, **arguments)
            assert words in str(caught.value)


def test_agreement_is_among_the_figures_of_the_stage(tmp_path):
    context = Context.at(tmp_path / "root")
    episodes = [episode("s", number, success=number % 2 == 0) for number in range(4)]
    append(tmp_path / "said.jsonl", [rated(trajectory, 5 if trajectory.success else 2) for trajectory in episodes[:3]])
    with context.store.draft("k" * 64, stage="collect", kind="trajectories", schema_version=1, inputs={}) as draft:
        write_trajectories(draft.path / "trajectories.parquet", episodes)
    sources = {
        "environment": {"_target_": "components.rewards.rules.outcome.Outcome"},
        "human": {"_target_": "components.rewards.rules.human.Human", "path": str(tmp_path / "said.jsonl")},
    }
    reward = {"_target_": "components.rewards.composition.aggregated.Aggregated", "sources": sources}
    json.dumps(validate(Target, reward).resolved())
    model = {"name": "tiny", "source": "random"}
    request = Request("judge", {"reward": reward, "model": model}, {"trajectories": "k" * 64})
    metrics = run_stage(request, context)[0].metrics
    assert metrics["agreement/environment_human/episodes"] == 3.0
    assert metrics["agreement/environment_human/spearman"] == 1.0
    assert 0 < metrics["agreement/alpha"] < 1
    assert metrics["unscored"] == 0.0
