"""Rows that the forms write from scored trajectories."""

from __future__ import annotations

from typing import Any

from components.data.forms import FORMS
from components.trajectories.schema import History, Message, Scenario, ToolCall, Trajectory

GREETING = [Message("system", "Play."), Message("user", "1 2 3")]


def episode(*answers: str, reward: float | None, calls: bool = False, steps: list[float] | None = None) -> Trajectory:
    messages = list(GREETING)
    for number, answer in enumerate(answers):
        called = [ToolCall("c", "look", "{}")] if calls else []
        messages += [*([Message("user", "next")] if number else []), Message("assistant", answer, tool_calls=called)]
    scenario = Scenario("a", {}, "train")
    return Trajectory(
        "a/0", scenario, 0, [History(messages)], step_rewards=steps or [], outcome={}, policy="p", reward=reward
    )


def rows(form: str, *episodes: Trajectory) -> list[dict[str, Any]]:
    write = FORMS[form].write
    assert write is not None
    return list(write(episodes))


def test_a_ranked_list_has_all_scored_episodes_best_first_with_the_turns_after_the_prompt():
    (row,) = rows(
        "ranking",
        episode("bad", reward=0.0),
        episode("lost", reward=None),
        episode("first", "second", reward=1.0),
        episode("fair", reward=0.5),
    )
    assert [message["content"] for message in row["prompt"]] == ["Play.", "1 2 3"]
    assert [message["content"] for message in row["ranked"][0]] == ["first", "next", "second"]
    assert row["ranked"][1:] == ["fair", "bad"]
    assert row["scores"] == [1.0, 0.5, 0.0]
    again = FORMS["ranking"].example(row, {})
    assert [candidate.reward for candidate in again.candidates] == [1.0, 0.5, 0.0]


def test_episodes_of_equal_rewards_give_no_ranked_list():
    assert rows("ranking", episode("x", reward=1.0), episode("y", reward=1.0)) == []
    assert rows("ranking", episode("x", reward=1.0)) == []


def test_the_true_answer_is_the_best_successful_text():
    (row,) = rows("ground_truth", episode("6", reward=0.0), episode("5", reward=1.0), episode("five", reward=0.7))
    assert row["ground_truth"] == "5"
    assert rows("ground_truth", episode("6", reward=0.4)) == []
    assert rows("ground_truth", episode("4", "5", reward=1.0)) == []
    assert rows("ground_truth", episode("5", reward=1.0, calls=True)) == []


def test_step_labels_are_written_for_episodes_with_a_reward_for_each_step():
    (row,) = rows("step_labels", episode("a", "b", reward=1.0, steps=[0.25, 1.0]), episode("a", reward=1.0))
    assert row["labels"] == [0.25, 1.0]
    assert row["reward"] == 1.0
    (candidate,) = FORMS["step_labels"].example(row, {}).candidates
    assert candidate.step_rewards == [0.25, 1.0]


def test_steps_are_read_back_as_the_same_episode(subtests):
    react = episode(
        'Thought: look\nAction: look {"at": "x"}', "Action: go\nAction Input: to desk 1", "Answer: 3", reward=1.0
    )
    natural = episode("a", "b", reward=0.5, steps=[0.8, 0.6])
    (row,) = rows("steps", episode("a", "b", reward=1.0, steps=[0.0, 0.0]))
    assert [step["reward"] for step in row["steps"]] == [0.0, 0.0], "rewards of 0 are no labels"
    assert FORMS["steps"].example(row, {}).candidates[0].step_labels == {}
    called = episode("why", "because", reward=1.0, calls=True, steps=[0.25, 0.75])
    called.tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    for trajectory, changed in [(react, {}), (called, {}), (natural, {"a": "Answer: a", "b": "Answer: b"})]:
        with subtests.test(changed=changed):
            (row,) = rows("steps", trajectory)
            (candidate,) = FORMS["steps"].example(row, {}).candidates
            assert [
                (message.content.removeprefix("Observation: "), len(message.tool_calls))
                for message in candidate.messages
            ] == [
                (changed.get(message.content, message.content), len(message.tool_calls))
                for message in trajectory.histories[0].messages
            ]
            assert candidate.reward == trajectory.reward
            assert candidate.step_rewards == trajectory.step_rewards
