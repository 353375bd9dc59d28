"""Grade as one number, by a judge over a socket."""

from __future__ import annotations

import pytest

from components.models.spec import ModelSpec
from components.rewards.judge import judge
from components.rewards.judges.graded import Graded, read
from components.rewards.llm.models.served import ServedJudge
from components.rewards.protocol import RewardResources
from tests.rewards.judge_server import Reply, judge_server
from tests.trajectories.builders import episode


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("7", 0.7),
        ("10", 1.0),
        ("The number is 3.", 0.3),
        ("8/10", 0.8),
        ("4 out of 5", 0.8),
        ("40%", 0.4),
        ("12", 1.0),
        ("-2", 0.0),
        ("<think>9 or 8</think> 2", 0.2),
        ("0.5", 0.05),
        ("none", None),
        ("", None),
    ],
)
def test_the_first_number_counts(text, score):
    assert read(text) == (None if score is None else pytest.approx(score))


def graded(server, tmp_path, group):
    reward = Graded(ServedJudge(url=server.url, model="judge", price={"input": 1, "output": 1}))
    reward.use(RewardResources(tmp_path, ModelSpec(name="any"), answers=tmp_path))
    try:
        return list(judge(reward, group, concurrency=2))
    finally:
        reward.close()


def test_each_episode_has_its_number(tmp_path):
    group = [episode("a", 0), episode("a", 1), episode("b", 0)]
    with judge_server(lambda asked: Reply(say="8")) as server:
        scores = graded(server, tmp_path, group)
        assert [(score.reward, score.components, score.explanation) for score in scores] == [
            (0.8, {"grade": 0.8}, "8")
        ] * 3
        assert all(score.cost > 0 for score in scores)
        asked = server.requests[0].body["messages"]
        assert [request["role"] for request in asked] == ["user", "assistant"] * 3 + ["user"]
        assert "response_format" not in server.requests[0].body
        before = len(server.requests)
        assert graded(server, tmp_path, group) == scores
        assert len(server.requests) == before


def test_an_answer_without_a_number_is_asked_for_once_more(tmp_path):
    with judge_server([Reply(say="very well"), Reply(say="9")]) as server:
        (score,) = graded(server, tmp_path, [episode("a", 0)])
        assert score.reward == 0.9
        assert server.requests[1].body["messages"][-2]["content"] == "very well"


def test_without_a_number_twice_it_is_unscored_and_asked_again_the_next_time(tmp_path):
    with judge_server(lambda asked: Reply(say="well done")) as server:
        (score,) = graded(server, tmp_path, [episode("a", 0)])
        assert score.reward is None
        assert "no number, twice: 'well done'" in score.failure.message
        graded(server, tmp_path, [episode("a", 0)])
        assert len(server.requests) == 4
