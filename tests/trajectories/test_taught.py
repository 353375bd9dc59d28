"""Tests of training episodes from human feedback: exact contents, and no held-out episodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from components.trajectories.feedback_episodes import mismatch, of_kinds, taught
from components.trajectories.groups import adjacent_groups, pairs, scenario_of
from components.trajectories.parts import CORRECTION
from components.trajectories.schema import ToolCall
from tests.trajectories.builders import FAILURE, episode, talk, tool_talk
from tests.trajectories.said import chose, corrected, rated

A, B, C = (episode("s", number) for number in range(3))
ALL = ("scores", "corrections", "choices")


def learned(episodes, answers, learns=ALL):
    return [(one, score.reward) for one, score in taught(episodes, of_kinds(answers, learns))]


def test_a_score_is_the_mean_of_what_people_gave():
    found = learned([A, B, C], [rated(A, 5), rated(A, 2, author="Bo"), rated(B, 1)])
    assert [(one.id.partition("~")[0], reward) for one, reward in found] == [("s/0", (1 + 0.25) / 2), ("s/1", 0.0)]
    assert {one.group for one, _ in found} == {"s"}


def test_a_correction_ends_the_conversation_with_what_the_person_wrote():
    long = episode("s", 0, histories=[tool_talk()])
    ((trajectory, reward),) = learned([long], [corrected(long, 2, "I look.")])
    texts = [(message.role, message.content) for message in trajectory.histories[0].messages]
    assert texts == [("system", "You serve customers."), ("user", "Where is A7?"), ("assistant", "I look.")]
    assert (reward, trajectory.policy, trajectory.histories[0].token_ids) == (1.0, CORRECTION, [])
    assert all(message.span is None for message in trajectory.histories[0].messages)


def test_a_correction_keeps_only_its_own_history():
    two = episode("s", 0, histories=[talk("a", "b"), talk("c", "d", agent="worker")])
    ((trajectory, _),) = learned([two], [corrected(two, 1, "e", history=1)])
    assert [(history.agent, [m.content for m in history.messages]) for history in trajectory.histories] == [
        ("worker", ["c", "e"])
    ]


def test_pairs_are_exactly_those_that_people_chose():
    answers = [chose(A, B, "b"), chose(B, C, "a"), chose(A, C, "tie")]
    found = taught([A, B, C], answers)
    scored = [replace(one, reward=score.reward) for one, score in found]
    for which in ("best_worst", "all"):
        made = pairs(scored, lambda one: one.reward, which, 0.0)
        names = {(better.id.partition("~")[0], worse.id.partition("~")[0]) for better, worse in made}
        assert names == {("s/1", "s/0"), ("s/1", "s/2")}
    assert {scenario_of(trajectory.group) for trajectory in scored} == {"s"}


def test_most_votes_decide_and_equal_ones_leave_the_pair_out():
    votes = [chose(A, B, "a"), chose(B, A, "a", author="Bo"), chose(A, B, "a", author="Cy")]
    assert {one.id.partition("~")[0]: reward for one, reward in learned([A, B], votes)} == {"s/0": 1.0, "s/1": 0.0}
    assert learned([A, B], votes[:2]) == []


def test_groups_lie_next_to_each_other_under_ids_of_their_own():
    answers = [rated(A, 5), chose(A, B), corrected(A, 1), rated(episode("t", 0), 3), rated(B, 2), chose(B, C)]
    found = [one for one, _ in taught([A, B, C, episode("t", 0)], answers)]
    assert len(list(adjacent_groups(found))) == 5
    assert len({trajectory.id for trajectory in found}) == len(found) == 8


def test_what_is_held_out_failed_or_another_episode_teaches_nothing():
    held_out = replace(A, scenario=replace(A.scenario, split="heldout"))
    failed = replace(B, failure=FAILURE)
    other = replace(C, histories=[talk("Hello.", "Something else.")])
    answers = [rated(A, 5), rated(B, 5), rated(C, 5), chose(A, B), corrected(A, 1)]
    assert learned([held_out, failed, other], answers) == []
    ((trajectory, _),) = learned([failed], [corrected(B, 1)])  # what it should have said is worth learning all the same
    assert trajectory.failure is None


def test_only_what_is_asked_for_is_learned():
    answers = [rated(A, 5), chose(A, B), corrected(A, 1)]
    assert [one.group for one, _ in learned([A, B], answers, ("scores",))] == ["s"]
    assert len(learned([A, B], answers, ("choices",))) == 2
    assert [one.policy for one, _ in learned([A, B], answers, ("corrections",))] == [CORRECTION]


@pytest.mark.parametrize("answer", [corrected(A, 0), corrected(A, 7), corrected(A, 1, history=3)])
def test_a_correction_of_what_the_assistant_did_not_say_does_not_fit(answer):
    assert mismatch(corrected(A, 1), {A.id: A}, "x") is None
    assert "not the assistant's" in mismatch(answer, {A.id: A}, "x")


def test_a_correction_calls_tools_of_its_episode_or_those_that_the_message_called():
    calls = ({"name": "look_up"}, {"name": "lookup"})
    reason = mismatch(corrected(A, 1, calls=calls), {A.id: A}, "x")
    assert "calls 'lookup'; the tools of the episode are look_up (did you mean look_up?)" in reason
    guessed = episode("s", 0, histories=[tool_talk()])
    guessed.histories[0].messages[2].tool_calls = [ToolCall("call_0", "lookup", "{}")]
    assert mismatch(corrected(guessed, 2, calls=calls), {guessed.id: guessed}, "x") is None
