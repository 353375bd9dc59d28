"""Tests of conversion to demonstrations and preference pairs."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings

from components.errors import ArtifactError
from components.trajectories.convert import (
    conversations,
    read_sft,
    to_message,
    to_openai,
    to_preference,
    to_sft,
    write_jsonl,
)
from components.trajectories.schema import Message, Score, Selection
from components.trajectories.store import read_scored, write_scores, write_selection, write_trajectories
from tests.trajectories import strategies
from tests.trajectories.builders import FAILURE, TOOLS, episode, talk, tool_talk


@given(strategies.messages)
@settings(deadline=None)
def test_messages_go_to_openai_and_back(message):
    back = to_message(to_openai(message))
    assert (back.role, back.content, back.tool_calls, back.tool_call_id) == (
        message.role,
        message.content,
        message.tool_calls,
        message.tool_call_id,
    )


def test_openai_form():
    history = tool_talk()
    assert to_openai(history.messages[2]) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "look_up", "arguments": '{"id": "A7"}'}}
        ],
    }
    assert to_openai(history.messages[3]) == {"role": "tool", "content": "shipped", "tool_call_id": "call_0"}
    assert to_message({"role": "assistant", "content": None}) == Message("assistant", "")


class TestConversations:
    def test_a_history_that_a_later_one_extends_counts_once(self):
        row = episode(histories=[talk("a", "b"), talk("a", "b", "c", "d"), talk("a", "b", "c", "d", "e", "f")])
        assert [[m["content"] for m in messages] for messages in conversations(row)] == [list("abcdef")]

    def test_other_agents_and_compacted_contexts_stay_apart(self):
        row = episode(histories=[talk("a", "b"), talk("a", "b", "c", "d", agent="helper"), talk("summary", "e")])
        assert len(conversations(row)) == 3

    def test_equal_histories_count_once(self):
        assert len(conversations(episode(histories=[talk("a", "b"), talk("a", "b")]))) == 1

    def test_one_in_which_the_assistant_never_spoke_is_none(self):
        assert conversations(episode(histories=[talk("a")])) == []


class TestSFT:
    def test_successes_only(self):
        rows = [
            episode("a", 0, success=True, reward=0.2),
            episode("a", 1, success=False, reward=0.9),
            episode("a", 2, success=True, failure=FAILURE),
            episode("a", 3),
        ]
        (record,) = to_sft(rows)
        assert record == {
            "messages": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Answer 0."}],
            "tools": TOOLS,
            "trajectory_id": "a/0",
        }

    def test_by_reward(self):
        rows = [
            episode("a", 0, success=True, reward=0.2),
            episode("a", 1, success=False, reward=0.9),
            episode("a", 2, reward=0.5),
            episode("a", 3, reward=None, success=True),
            episode("a", 4, reward=1.0, failure=FAILURE),
        ]
        assert [record["trajectory_id"] for record in to_sft(rows, min_reward=0.5)] == ["a/1", "a/2"]

    def test_each_conversation_is_a_record(self):
        rows = [episode(success=True, histories=[talk("a", "b"), talk("c", "d", agent="helper")])]
        assert [record["messages"][1]["content"] for record in to_sft(rows)] == ["b", "d"]


class TestPreference:
    def test_best_against_worst_of_each_scenario(self):
        rewards = {"a": [0.5, 1.0, 0.0, 1.0], "b": [-3.0, -1.0]}
        rows = [episode(name, i, reward=r) for name, group in rewards.items() for i, r in enumerate(group)]
        pairs = list(to_preference(rows))
        assert [pair["scenario_id"] for pair in pairs] == ["a", "b"]
        assert [pair["chosen"][-1]["content"] for pair in pairs] == ["Answer 1.", "Answer 1."]
        assert [pair["rejected"][-1]["content"] for pair in pairs] == ["Answer 2.", "Answer 0."]
        assert (pairs[0]["score_chosen"], pairs[0]["score_rejected"]) == (1.0, 0.0)
        assert pairs[0]["tools"] == TOOLS

    def test_ties_give_no_pair(self):
        for rewards in ([1.0, 1.0], [0.1 + 0.2, 0.3], [1.0], [1.0, None], []):
            assert list(to_preference([episode("a", i, reward=r) for i, r in enumerate(rewards)])) == []

    def test_failed_episodes_are_left_out(self):
        rows = [episode("a", 0, reward=1.0), episode("a", 1, reward=0.0, failure=FAILURE)]
        assert list(to_preference(rows)) == []

    def test_episodes_of_several_conversations_are_left_out_aloud(self, caplog):
        several = [talk("a", "b"), talk("c", "d", agent="helper")]
        rows = [
            episode("a", 0, reward=1.0, histories=several),
            episode("a", 1, reward=0.5),
            episode("a", 2, reward=0.0),
        ]
        with caplog.at_level(logging.WARNING):
            (pair,) = to_preference(rows)
        assert pair["score_chosen"] == 0.5
        assert "several conversations: 1" in caplog.text

    def test_a_scenario_that_comes_back_is_refused(self):
        rows = [episode(name, i, reward=float(i)) for i in range(2) for name in ("a", "b")]
        with pytest.raises(ArtifactError, match="scenario a do not lie next to each other"):
            list(to_preference(rows))


class TestStreams:
    def test_records_come_as_the_trajectories_do(self):
        pulled = []

        def rows():
            for number in range(6):
                pulled.append(number)
                yield episode("ab"[number // 3], number % 3, success=True, reward=float(number))

        records = to_sft(rows())
        assert pulled == []
        assert next(records)["trajectory_id"] == "a/0"
        assert pulled == [0]
        pulled.clear()
        assert next(to_preference(rows()))["scenario_id"] == "a"
        assert pulled == [0, 1, 2, 3]

    def test_a_file_of_lines(self, tmp_path):
        odd = "naïve \ud83d 漢字\n\u2028"
        records = list(to_sft([episode("a", i, success=True, histories=[talk("Hi.", odd)]) for i in range(3)]))
        assert write_jsonl(tmp_path / "sft.jsonl", iter(records)) == 3
        lines = (tmp_path / "sft.jsonl").read_text(encoding="ascii").splitlines()
        assert [json.loads(line) for line in lines] == records

    def test_a_conversion_that_raises_leaves_the_earlier_file_alone(self, tmp_path):
        path = tmp_path / "pairs.jsonl"
        write_jsonl(path, [{"old": 1}])
        rows = [episode(name, i, reward=float(i)) for name in ("a", "b", "a") for i in range(2)]
        with pytest.raises(ArtifactError):
            write_jsonl(path, to_preference(rows))
        assert path.read_text() == '{"old": 1}\n'
        assert [file.name for file in tmp_path.iterdir()] == ["pairs.jsonl"]


class TestFromFiles:
    @pytest.fixture
    def files(self, tmp_path):
        rows = [
            episode("a", 0, success=True, histories=[tool_talk()]),
            episode("a", 1, success=False),
            episode("b", 0, success=True, histories=[talk("Hi.", "Hé\ud83d."), talk("Sub.", "Yes.", agent="worker")]),
            episode("b", 1, success=True, failure=FAILURE),
            episode("c", 0, success=True),
            episode("c", 1),
        ]
        rewards = [0.1, 0.9, None, None, 1.0, 0.5]
        write_trajectories(tmp_path / "trajectories.parquet", rows)
        scores = [Score(row.id, reward) for row, reward in zip(rows, rewards, strict=True)]
        write_scores(tmp_path / "scores.parquet", scores)
        write_selection(tmp_path / "selection.parquet", [Selection(row.id, row.id != "c/0", "x") for row in rows])
        return [tmp_path / f"{name}.parquet" for name in ("trajectories", "scores", "selection")]

    def test_records_are_those_of_the_trajectories(self, files):
        for chosen in (files, [*files[:2], None]):
            for min_reward in (None, 0.5):
                records = list(read_sft(*chosen, min_reward=min_reward))
                assert records == list(to_sft(read_scored(*chosen), min_reward))
                assert records

    def test_each_line_is_its_record_as_json(self, files, tmp_path):
        records = [*read_sft(*files[:2]), {"tools": [], "messages": []}, {"tools": None}, {"é": 1}, {}]
        write_jsonl(tmp_path / "sft.jsonl", records)
        assert (tmp_path / "sft.jsonl").read_text() == "".join(f"{json.dumps(record)}\n" for record in records)
