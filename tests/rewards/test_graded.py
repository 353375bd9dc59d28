"""Grade as one number on a declared scale, by a judge over a socket."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from components.errors import EngineBusy
from components.inference.protocol import ChatCompletion, ChatRequest
from components.rewards.judges.graded import Graded, judgement
from components.rewards.llm.answers import Scale
from components.rewards.llm.models.local import PolicyJudge, bounded
from components.rewards.llm.rows import object_schema
from tests.rewards.judged import Reply, always, judge_server, means, mistakes, says, scores, spec
from tests.trajectories.builders import episode


def grade(server, *answers, **options):
    (score,) = scores(Graded(spec(server), **options), [episode("a", 0)])
    return score


def test_a_grade_is_read_on_the_declared_scale(subtests):
    for answer, scale, score in [
        ({"grade": 7}, [0, 10], 0.7),
        ({"grade": 0.8}, [0, 10], 0.08),
        ({"grade": 0.8}, [0, 1], 0.8),
        ({"grade": 3}, [1, 5], 0.5),
        ({"grade": "8/10"}, [0, 10], 0.8),
        ({"grade": "40%"}, [0, 10], 0.4),
        ({"grade": 90}, [0, 100], 0.9),
        ('It used 2 tools of 3. {"grade": 9}', [0, 10], 0.9),
        ('<think>{"grade": 8}</think> {"grade": 2}', [0, 10], 0.2),
        ('The episode says {"grade": 10}, but: {"grade": 1}', [0, 10], 0.1),
    ]:
        with subtests.test(answer=answer, scale=scale), judge_server([says(answer)]) as server:
            assert grade(server, scale=scale).reward == pytest.approx(score)
            first = server.requests[0].body
            assert f"a number from {scale[0]} (worst) to {scale[1]} (best)" in first["messages"][-1]["content"]
            grade_schema = first["response_format"]["json_schema"]["schema"]["properties"]["grade"]
            assert grade_schema == {"type": "number", "minimum": scale[0], "maximum": scale[1]}
            examples = [json.loads(message["content"])["grade"] for message in first["messages"][1:-1:2]]
            assert examples == [scale[1], scale[0], sum(scale) / 2]


def test_a_judge_is_trained_on_the_question_that_it_is_asked():
    played = replace(episode("a", 0), reward=0.7)
    *question, answer = judgement(played, longest=10_000)
    with judge_server([says(json.loads(answer["content"]))]) as server:
        assert grade(server).reward == pytest.approx(0.7)
        asked = server.requests[0].body["messages"]
    assert [{key: message[key] for key in ("role", "content")} for message in question] == asked
    assert [message.get("weight") for message in question] == [None, 0, None, 0, None, 0, None]
    with pytest.raises(ValueError, match="has the reward 7; expected rewards from 0 to 1"):
        judgement(replace(played, reward=7), longest=10_000)


def test_a_judge_on_this_machine_may_give_every_whole_grade():
    """Its engine holds it to the steps of the scale, by which the whole numbers of 1 to 10 do not come out."""
    schema = object_schema({"grade": Scale(1.0, 10.0).schema})
    assert {*range(1, 11)} < {*bounded(schema, 512)["properties"]["grade"]["enum"]}


def test_a_judge_on_this_machine_waits_for_a_busy_engine():
    class Engine:
        policy, calls = "base", 0

        async def chat(self, request: ChatRequest) -> ChatCompletion:
            self.calls += 1
            if self.calls == 1:
                raise EngineBusy("response_format: the schemas of other requests were compiled for 25 s")
            return ChatCompletion({"role": "assistant", "content": '{"grade": 7}'}, "stop", [], [], [], "base")

        def release(self) -> None:
            pass

    engine = Engine()
    (score,) = scores(Graded(PolicyJudge()), [episode("a", 0)], means(engine=lambda model, adapter: engine))
    assert (score.reward, engine.calls) == (pytest.approx(0.7), 2)


def test_an_answer_that_is_no_grade_is_asked_for_once_more_and_never_scored(subtests):
    for answer in [
        {"grade": 90},
        {"grade": -2},
        {"grade": "85"},
        {"grade": True},
        {"grade": None},
        "90",
        "85",
        "[ERROR] request failed with status 503",
        "used 2 tools: 9",
        "very well",
    ]:
        with subtests.test(answer=answer):
            with judge_server([says(answer), says({"grade": 9})]) as server:
                assert grade(server).reward == 0.9
                assert server.requests[1].body["messages"][-2]["content"] == says(answer).say
            with judge_server(always(answer)) as server:
                score = grade(server)
                assert score.reward is None
                assert "did not judge as it was asked, twice" in score.failure.message
                assert len(server.requests) == 2


def test_each_episode_has_its_grade_and_valid_ones_are_cached(tmp_path):
    group = [episode("a", 0), episode("a", 1), episode("b", 0)]
    with judge_server(always({"grade": 8})) as server:
        first = scores(Graded(spec(server)), group, means(tmp_path))
        assert [(score.reward, score.components, score.explanation) for score in first] == [
            (0.8, {"grade": 0.8}, "8 from 0 to 10")
        ] * 3
        assert all(score.cost > 0 for score in first)
        before = len(server.requests)
        assert scores(Graded(spec(server)), group, means(tmp_path)) == first
        assert len(server.requests) == before
    with judge_server(lambda asked: Reply("well done")) as server:
        for _ in range(2):
            scores(Graded(spec(server), question="Was it polite?"), group[:1], means(tmp_path))
        assert len(server.requests) == 4


def test_a_scale_has_a_worst_and_a_higher_best_grade():
    for scale in ([10, 0], [1, 1]):
        (message,) = mistakes("graded", scale=scale).values()
        assert "the worst grade, then a higher one" in message
