"""What all judges of single episodes share: several judges, costs, answers asked once, budgets, and broken lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from components.errors import BudgetExceeded, ResourceError
from components.rewards.judge import judge
from components.rewards.judges.constitution import PRINCIPLES, Constitution
from components.rewards.judges.critic import DIMENSIONS, Critic
from components.rewards.judges.graded import Graded
from components.rewards.judges.rubric import Rubric, RubricItem
from components.rewards.llm.budget import Meter
from components.rewards.llm.judge_reward import EpisodeJudgeReward
from components.rewards.llm.models.served import ServedJudge
from tests.rewards import judge_replies as replies
from tests.rewards.judged import Reply, always, judge_server, means, says, scores, spec
from tests.trajectories.builders import FAILURE, episode, talk


def rows(key: str, names: Any) -> Callable[[float], dict[str, Any]]:
    return lambda score: {"scores": [{key: name, "explanation": "Why.", "score": score} for name in names]}


# name: (reward of judge models, answer that scores an episode, one of its components)
JUDGES: dict[str, tuple[Callable[[Any], EpisodeJudgeReward], Callable[[float], dict[str, Any]], str]] = {
    "critic": (Critic, rows("dimension", DIMENSIONS), "recovery"),
    "constitution": (Constitution, rows("principle", PRINCIPLES), "honest"),
    "rubric": (
        lambda model: Rubric(model, {"goal": RubricItem(text="It reached the goal.")}),
        lambda score: {"items": [{"item": "goal", "explanation": "Why.", "met": "yes" if score else "no"}]},
        "goal",
    ),
    "graded": (Graded, lambda score: {"grade": 10 * score}, "grade"),
}


@pytest.fixture(params=JUDGES.values(), ids=JUDGES)
def judged(request):
    return request.param


def group(count: int = 1):
    return [episode(sample=i, histories=[talk("Do it.", f"Done ({i}).")]) for i in range(count)]


def test_every_judge_of_single_episodes_is_in_the_table():
    model = ServedJudge(url="http://127.0.0.1:9/v1", model="judge")
    built_in = {kind for kind in EpisodeJudgeReward.__subclasses__() if kind.__module__.startswith("components.")}
    assert {type(make(model)) for make, _, _ in JUDGES.values()} == built_in


def test_several_judges_are_averaged_and_one_that_could_not_score_has_no_part_in_it(judged):
    make, answer, part = judged
    for other, expected in ((answer(0.0), {"judge/a": 1.0, "judge/b": 0.0, "spread": 0.5}), ("no", {"judge/a": 1.0})):
        script = {"a": says(answer(1.0)), "b": says(other)}
        with judge_server(lambda asked, script=script: script[asked.body["model"]], models=("a", "b")) as server:
            (score,) = scores(make([spec(server, model="a"), spec(server, model="b")]), group())
        shared = {name: value for name, value in score.components.items() if name in ("judge/a", "judge/b", "spread")}
        assert shared == expected
        assert score.reward == score.components[part] == (0.5 if "judge/b" in expected else 1.0)


def test_it_costs_what_was_read_and_written(judged):
    make, answer, _ = judged
    reply = Reply(says(answer(1.0)).say, usage={"prompt_tokens": 1000, "completion_tokens": 500})
    with judge_server(lambda asked: reply) as server:
        assert scores(make(spec(server)), group())[0].cost == pytest.approx((1000 * 1.0 + 500 * 4.0) / 1e6)
        assert scores(make(spec(server, price=None)), group())[0].cost is None


def test_a_second_time_nothing_is_asked_and_it_costs_the_same(judged, tmp_path):
    make, answer, _ = judged
    with judge_server(always(answer(1.0))) as server:
        first, meter = scores(make(spec(server)), group(), means(tmp_path)), Meter()
        assert scores(make(spec(server)), group(), means(tmp_path, meter)) == first
    assert (len(server.requests), meter.cached, meter.calls) == (1, 1, 0)


def test_a_budget_ends_it_and_the_limit_of_requests_at_once_is_kept(judged):
    make, answer, _ = judged
    with judge_server(always(answer(1.0))) as server, pytest.raises(BudgetExceeded):
        scores(make(spec(server)), group(9), means(meter=Meter(0.001)), concurrency=1)
    assert len(server.requests) < 9
    with judge_server(lambda asked: Reply(says(answer(1.0)).say, after=0.1)) as server:
        scores(make(spec(server)), group(12), concurrency=4)
    assert server.most_at_once == 4


def test_a_broken_line_is_mended_a_refusal_unscored_and_a_wrong_key_ends_the_judging(judged):
    make, answer, _ = judged
    with judge_server([replies.OVERLOADED, says(answer(1.0))]) as server:
        assert scores(make(spec(server)), group())[0].reward == 1.0
    with judge_server(lambda asked: replies.REFUSAL) as server:
        assert "refused" in scores(make(spec(server)), group())[0].failure.message
    with judge_server(lambda asked: replies.WRONG_KEY) as server, pytest.raises(ResourceError, match="refuses the key"):
        scores(make(spec(server)), group())


def test_a_failed_episode_is_not_shown_and_without_resources_it_says_so(judged):
    make, answer, _ = judged
    with judge_server(always(answer(1.0))) as server:
        results = scores(make(spec(server)), [episode(failure=FAILURE), *group(2)[1:]])
        assert [score.reward for score in results] == [None, 1.0]
        assert len(server.requests) == 1
        with pytest.raises(ResourceError, match=r"use\(resources\)"):
            list(judge(make(spec(server)), group()))
