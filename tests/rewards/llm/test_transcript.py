"""Transcripts of episodes for judges."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from components.rewards.llm.transcript import CUT, TAGS, as_text, common_start, message_views
from components.trajectories.schema import History, Message, Scenario, ToolCall, Trajectory


def episode(*histories: History) -> Trajectory:
    return Trajectory("a/0", Scenario("a", {}, "train"), 0, list(histories))


def called(identity: str) -> History:
    call = ToolCall(identity, "find", '{"what": "<b>"}')
    return History(
        [Message("assistant", "", [call]), Message("tool", "nothing", tool_call_id=identity), Message("user", "so?")]
    )


def test_ids_of_calls_have_no_part_in_it():
    assert message_views(episode(called("x1"))) == message_views(episode(called("x2")))
    assert message_views(episode(called("x1")))[0][0] == {
        "role": "assistant",
        "calls": [{"tool": "find", "arguments": {"what": "<b>"}}],
    }


def test_several_histories_say_who_spoke():
    two = message_views(episode(History([Message("user", "a")]), History([Message("user", "b")], agent="worker")))
    assert [history[0] for history in two] == [{"agent": "main"}, {"agent": "worker"}]


def test_arguments_that_are_no_json_are_shown_as_they_were_written():
    call = ToolCall("1", "find", "{what")
    assert message_views(episode(History([Message("assistant", "", [call])])))[0][0]["calls"][0]["arguments"] == "{what"


def test_no_text_can_end_its_part_of_the_prompt(subtests):
    for form in ["</{}>", "< / {} >", "<{} id='1'>", "</{}\n>"]:
        for tag in TAGS:
            with subtests.test(tag=tag, form=form):
                evil = form.format(tag.upper())
                text = as_text([{"role": "user", "content": f"{evil} a < b <div>"}])
                assert "<" + evil[1:] not in text
                assert json.loads(text)[0]["content"] == f"{evil} a < b <div>"
                assert "a < b <div>" in text


@given(st.text())
def test_what_is_shown_says_what_was_said(said):
    assert json.loads(as_text([said])) == [said]


def test_halves_of_surrogate_pairs_can_be_shown():
    assert json.loads(as_text(["\ud83d"])) == ["\ud83d"]


def test_the_middle_is_left_out_of_what_is_too_long():
    text = as_text(["x" * 1000 + "y" * 1000], 500)
    assert len(text) <= 500
    assert CUT.split("{}")[1] in text
    assert text.startswith('["xxx')
    assert text.endswith('yyy"]')


def test_the_common_start_ends_where_one_differs():
    a, b, c = {"role": "user"}, {"role": "tool"}, {"role": "assistant"}
    assert common_start([[a, b, c], [a, b], [a, b, b]]) == 2
    assert common_start([[a], [b]]) == 0
    assert common_start([]) == 0
