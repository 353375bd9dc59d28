"""Critique and revision of answers by principles."""

from __future__ import annotations

import json

import pytest

from components.rewards.judges.constitution import PRINCIPLES, Constitution, Principle
from tests.rewards.judged import always, data, judge_server, means, mistakes, says, scores, spec, target, task
from tests.trajectories.builders import episode, talk, tool_talk

GIVEN = {"helpful": 1.0, "honest": 0.5, "harmless": 0.0}
TALK = talk("Hello.", "You fool.", "And?", "Go away.")


def answer(given=None):
    rows = [
        {"principle": name, "critique": f"As to {name}.", "score": score} for name, score in (given or GIVEN).items()
    ]
    return {"scores": rows}


def about(asked):
    """Return the answer in question."""
    (judged,) = [message for message in json.loads(data(asked)) if message.get("judged")]
    return judged["content"]


def revising(asked):
    """Reply with a revision of the criticised answer."""
    if len(asked.body["messages"]) == 2:
        return says(answer())
    return says({"revision": f"Better than: {about(asked)}"})


def judge_episode(reward, trajectory=None, given=None):
    return scores(reward, [trajectory or episode(histories=[TALK])], given)[0]


def test_the_score_is_the_weighted_mean_over_the_principles():
    weighted = {
        name: Principle(text=PRINCIPLES[name].text, weight=weight)
        for name, weight in zip(GIVEN, (1, 2, 5), strict=True)
    }
    with judge_server(always(answer())) as server:
        assert judge_episode(Constitution(spec(server))).reward == pytest.approx(0.5)
        score = judge_episode(Constitution(spec(server), weighted))
    assert score.reward == pytest.approx(2 / 8)
    assert score.components == pytest.approx({"constitution": 2 / 8, **GIVEN})
    assert "honest 0.5: As to honest." in score.explanation
    for name, principle in PRINCIPLES.items():
        assert f"- {name}: {principle.text}" in task(server.requests[0])


def test_the_last_answer_is_judged_with_what_came_before_it():
    with judge_server(always(answer())) as server:
        judge_episode(Constitution(spec(server)))
    (asked,) = server.requests
    assert about(asked) == "Go away."
    assert [message["content"] for message in json.loads(data(asked))] == ["Hello.", "You fool.", "And?", "Go away."]


def test_each_answer_can_be_judged_and_does_not_see_what_comes_after():
    def script(asked):
        return says(answer(dict.fromkeys(GIVEN, 0.25 if about(asked) == "You fool." else 1.0)))

    with judge_server(script) as server:
        score = judge_episode(Constitution(spec(server), answers="each"))
    assert score.reward == pytest.approx(0.625)
    assert score.components["honest"] == pytest.approx(0.625)
    first = next(asked for asked in server.requests if about(asked) == "You fool.")
    assert "And?" not in first.prompt


def test_calls_of_tools_are_answers_too_and_are_not_written_anew():
    with judge_server(revising) as server:
        score = judge_episode(Constitution(spec(server), answers="each", revise=True), episode(histories=[tool_talk()]))
    first, second = (asked for asked in server.requests if len(asked.body["messages"]) == 2)
    judged = {json.dumps(next(m for m in json.loads(data(asked)) if m.get("judged"))) for asked in (first, second)}
    assert any("look_up" in text for text in judged)
    assert any("on its way" in text for text in judged)
    assert score.explanation.count("revision: ") == 1
    assert len(server.requests) == 3


def test_an_answer_without_words_is_judged_and_an_episode_without_answers_is_not():
    with judge_server(always(answer())) as server:
        assert judge_episode(
            Constitution(spec(server)), episode(histories=[talk("Hello.", "")])
        ).reward == pytest.approx(0.5)
        score = judge_episode(Constitution(spec(server)), episode(histories=[talk("Hello.")]))
    assert (score.reward, score.cost, len(server.requests)) == (None, 0.0, 1)
    assert score.failure.message == "the episode has no answer: no message of the agent"


def test_an_agent_among_several_is_named_beside_its_answer():
    with judge_server(always(answer())) as server:
        judge_episode(Constitution(spec(server)), episode(histories=[talk("a", "b"), talk("c", "d", agent="worker")]))
    shown = json.loads(data(server.requests[0]))
    assert shown[0] == {"agent": "worker"}
    assert about(server.requests[0]) == "d"


def test_an_answer_is_written_anew_in_the_light_of_its_critique():
    with judge_server(revising) as server:
        score = judge_episode(Constitution(spec(server), revise=True))
    assert score.reward == pytest.approx(0.5)  # of the answer as it was
    assert "revision: Better than: Go away." in score.explanation
    second = server.requests[1].body["messages"]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert "honest, 0.5: As to honest." in second[2]["content"]
    assert server.requests[1].body["response_format"]["json_schema"]["schema"]["required"] == ["revision"]


def test_what_keeps_the_principles_is_left_as_it_is():
    with judge_server(always(answer(dict.fromkeys(GIVEN, 1)))) as server:
        score = judge_episode(Constitution(spec(server), revise=True))
    assert (score.reward, len(server.requests)) == (1.0, 1)


@pytest.mark.parametrize("wrong", [{"revision": ""}, {"revision": "Go away. "}, {"revision": 7}, "no"])
def test_a_revision_that_is_none_is_asked_for_once_more_and_the_score_stands(wrong):
    def script(asked):
        return says(answer()) if len(asked.body["messages"]) == 2 else says(wrong)

    with judge_server(script) as server:
        score = judge_episode(Constitution(spec(server), revise=True))
    assert score.reward == pytest.approx(0.5)
    assert "revision" not in score.explanation
    assert len(server.requests) == 3


def test_the_cost_is_of_both_questions():
    def script(asked):
        from dataclasses import replace

        return replace(revising(asked), usage={"prompt_tokens": 1000, "completion_tokens": 0})

    with judge_server(script) as server:
        assert judge_episode(Constitution(spec(server), answers="each", revise=True)).cost == pytest.approx(
            4 * 1000 / 1e6
        )


def test_a_principle_without_a_score_leaves_the_episode_unscored():
    with judge_server(always(answer({"helpful": 1}))) as server:
        score = judge_episode(Constitution(spec(server)))
    assert score.reward is None
    assert "lacks honest, harmless" in score.failure.message


def test_a_second_time_nothing_is_asked(tmp_path):
    with judge_server(revising) as server:
        first = judge_episode(Constitution(spec(server), revise=True), given=means(tmp_path))
        assert judge_episode(Constitution(spec(server), revise=True), given=means(tmp_path)) == first
    assert len(server.requests) == 2


def test_the_principles_of_the_file_are_those_of_the_class():
    assert target("constitution").build().principles == PRINCIPLES


def test_wrong_configuration_is_named(subtests):
    for changes, path, words in [
        ({"principles": {"a": {"text": ""}}}, "reward.principles.a.text", "1"),
        ({"principles": {"a": {"text": "x", "weight": 0}}}, "reward.principles.a.weight", "more than 0"),
        ({"principles": {"spread": {"text": "x"}}}, "reward.principles", "got spread"),
        ({"principles": {}}, "reward.principles", "1"),
        ({"answers": "first"}, "reward.answers", "last"),
    ]:
        with subtests.test(changes=changes):
            assert words in mistakes("constitution", **changes)[path]
