"""Tests of human feedback: validation of lines, valid answers, and durable writes."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.errors import ResourceError
from components.trajectories.feedback import (
    Withdrawal,
    append,
    content_digest,
    digest_of,
    read,
    read_all,
    read_line,
    standing,
    write_line,
)
from components.trajectories.schema import History, Message
from tests.trajectories.builders import episode, talk, tool_talk
from tests.trajectories.said import ARTIFACT, chose, corrected, labelled_step, rated

ONE, OTHER = episode("s", 0), episode("s", 1)


def taken_back(answer, author="Ada", second=59):
    return Withdrawal(answer=answer.id, author=author, time=f"2026-11-05T10:59:{second}+00:00", artifact=ARTIFACT)


@settings(deadline=None)
@given(st.text(max_size=40), st.text(min_size=1, max_size=40).filter(str.strip), st.sampled_from("ab"))
def test_every_line_comes_back_as_it_was(note, text, better):
    calls = ({"name": "look_up", "arguments": '{"id": 7}'},)
    for line in (
        rated(ONE, 4, note=note),
        chose(ONE, OTHER, better, note=note),
        corrected(ONE, 1, text, calls=calls),
        labelled_step(ONE, 1, better == "a"),
        taken_back(rated(ONE, 4)),
    ):
        text_of_it = write_line(line)
        assert text_of_it.endswith("\n")
        assert text_of_it.isascii()
        assert len(text_of_it.splitlines()) == 1
        assert read_line(text_of_it, "here") == line
        assert read_line(text_of_it, "here").id == line.id


def test_the_last_answer_of_each_author_about_each_thing_stands():
    first, second, other = rated(ONE, 2, second=1), rated(ONE, 5, second=2), rated(ONE, 3, author="Bo", second=1)
    turned = chose(OTHER, ONE, "b", second=4)  # the same pair, from the other side
    lines = [second, first, other, chose(ONE, OTHER, "b", second=3), turned, corrected(ONE, 1)]
    assert {answer.id for answer in standing(lines)} == {second.id, other.id, turned.id, corrected(ONE, 1).id}


def test_what_is_withdrawn_gives_way_to_what_it_had_replaced():
    first, second = rated(ONE, 2, second=1), rated(ONE, 5, second=2)
    assert standing([first, second, taken_back(second)]) == [first]
    assert standing([first, second, taken_back(second), taken_back(first)]) == []
    assert standing([second, taken_back(second, author="Bo")]) == [second]  # only one's own


def test_answers_of_one_time_that_contradict_each_other_are_named_with_their_lines(tmp_path):
    file, later = tmp_path / "x.jsonl", rated(ONE, 1, second=1)
    agreeing = [chose(ONE, OTHER, "b"), chose(OTHER, ONE, "a"), rated(ONE, 2), rated(ONE, 4), later]
    append(file, [*agreeing, rated(ONE, 3, author="Bo"), labelled_step(ONE, 1, True), labelled_step(ONE, 1, False)])
    with pytest.raises(ResourceError, match=r"x\.jsonl, line 8: contradicts .*x\.jsonl, line 7 \(step of 's/0' by Ada"):
        read(file)
    append(file, [taken_back(labelled_step(ONE, 1, True))])
    assert len(standing(read(file))) == 4
    (tmp_path / "y.jsonl").write_text(write_line(rated(ONE, 4, second=1)))
    with pytest.raises(ResourceError, match=r"y\.jsonl, line 1: contradicts .*x\.jsonl, line 5 "):
        read(tmp_path)
    append(tmp_path / "y.jsonl", [rated(ONE, 5, second=2)])
    assert rated(ONE, 5, second=2) in standing(read(tmp_path))


def test_the_content_that_was_read_is_what_messages_and_tools_say():
    assert content_digest(ONE) == content_digest(replace(ONE, id="x", reward=0.5, metrics={"turns": 9.0}))
    assert content_digest(ONE) != content_digest(replace(ONE, tools=[]))
    assert content_digest(ONE) != content_digest(replace(ONE, histories=[talk("Hello.", "Answer 0!")]))
    odd = replace(ONE, histories=[History([Message("assistant", "\ud800")])])  # models write such things
    assert len(content_digest(odd)) == 64


def test_the_digest_of_what_is_said_knows_no_order():
    answers = [rated(ONE, 2), chose(ONE, OTHER)]
    assert digest_of(answers) == digest_of(answers[::-1]) != digest_of(answers[:1])


def test_what_is_added_is_there_once(tmp_path):
    file = tmp_path / "feedback" / "x.jsonl"
    lines = [rated(ONE, 2), chose(ONE, OTHER)]
    assert append(file, lines) == 2
    assert append(file, [*lines, corrected(ONE, 1)]) == 1
    assert read(file) == [*lines, corrected(ONE, 1)]
    other_form = json.dumps(dict(reversed(rated(OTHER, 1).model_dump(mode="json").items())), indent=None)
    file.write_text(file.read_text() + other_form)  # by hand, without a line break at the end
    assert append(file, [rated(OTHER, 1), rated(OTHER, 2, second=1)]) == 2 - 1
    assert [answer.id for answer in read(file)][-2:] == [rated(OTHER, 1).id, rated(OTHER, 2, second=1).id]
    file.write_text(file.read_text(), encoding="utf-8-sig")  # by an editor that writes a byte order mark
    assert append(file, lines) == 0
    assert read(file)[:2] == lines


def test_a_line_that_was_never_acknowledged_is_no_damage(tmp_path, caplog):
    file = tmp_path / "x.jsonl"
    append(file, [rated(ONE, 2)])
    whole = file.read_bytes()
    for cut in range(1, len(whole) - 1, 7):
        file.write_bytes(whole + write_line(rated(OTHER, 3)).encode()[:cut])
        assert read(file) == [rated(ONE, 2)]
    assert "ends in the middle of a line" in caplog.text
    append(file, [rated(OTHER, 4)])
    assert read(file) == [rated(ONE, 2), rated(OTHER, 4)]


def write_many(path, author, ready):
    ready.wait()
    for second in range(25):
        append(path, [rated(ONE, 1 + second % 5, author=author, second=second)])


def test_people_in_several_processes_lose_nothing(tmp_path):
    file = tmp_path / "x.jsonl"
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(3)
    workers = [context.Process(target=write_many, args=(file, name, ready)) for name in ("Ada", "Bo", "Cy")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(600)
        assert worker.exitcode == 0
    lines = read(file)
    assert {(line.author, line.time) for line in lines} == {
        (name, rated(ONE, 1, second=second).time) for name in ("Ada", "Bo", "Cy") for second in range(25)
    }
    assert len(lines) == 75


def said(**changes):
    data = {**rated(ONE, 3).model_dump(mode="json"), **changes}
    return {name: value for name, value in data.items() if value is not ...}


DAMAGED = {
    "invalid JSON": "{not json",
    "kind is None": json.dumps([1]),
    "kind is 'praise'; expected one of score": json.dumps(said(kind="praise")),
    "score: 6: expected at most 5": json.dumps(said(score=6)),
    "score: 0: expected at least 1": json.dumps(said(score=0)),
    "score: true: expected a whole number": json.dumps(said(score=True)),
    "score: 3.5: expected a whole number": json.dumps(said(score=3.5)),
    "score: is missing": json.dumps(said(score=...)),
    "colour: no such key": json.dumps(said(colour="red")),
    "artifact: 'abc'": json.dumps(said(artifact="abc")),
    "time: 'yesterday': expected a time with its zone": json.dumps(said(time="yesterday")),
    "2026-11-05T10:11:12': expected a time with its zone": json.dumps(said(time="2026-11-05T10:11:12")),
    "author: ''": json.dumps(said(author="")),
    "a correction needs at least one of them": json.dumps({**corrected(ONE, 1).model_dump(mode="json"), "text": " "}),
    f"line 2: other: {ONE.id!r}: expected two episodes": json.dumps(
        {**chose(ONE, OTHER).model_dump(mode="json"), "other": ONE.id}
    ),
    "JSON text of an object": json.dumps(
        {**corrected(ONE, 1).model_dump(mode="json"), "calls": [{"name": "x", "arguments": "[1]"}]}
    ),
}


def test_a_damaged_line_is_named_with_its_number(tmp_path):
    file = tmp_path / "mine.jsonl"
    for words, line in DAMAGED.items():
        file.write_text(write_line(rated(ONE, 3)) + line + "\n" + write_line(rated(OTHER, 3)))
        with pytest.raises(ResourceError) as caught:
            read(file)
        assert str(caught.value).startswith(f"{file}, line 2: ")
        assert words in str(caught.value)


def test_all_damaged_lines_are_named_up_to_ten(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("no\n" * 13)
    with pytest.raises(ResourceError) as caught:
        read(file)
    assert "line 10: " in str(caught.value)
    assert "line 11: " not in str(caught.value)
    assert "and 3 more lines" in str(caught.value)


def test_a_folder_is_all_its_files(tmp_path):
    append(tmp_path / "a.jsonl", [rated(ONE, 1, second=1)])
    append(tmp_path / "b.jsonl", [rated(ONE, 5, second=2), corrected(OTHER, 1)])
    assert [answer.kind for answer in read_all(tmp_path)] == ["correction", "score"]
    assert read_all(tmp_path)[1].score == 5
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResourceError, match="holds no feedback"):
        read_all(tmp_path / "empty")
    with pytest.raises(ResourceError, match="there is no file"):
        read_all(tmp_path / "nothing")


def test_a_correction_may_call_tools():
    one = corrected(episode(histories=[tool_talk()]), 2, "", calls=({"name": "look_up", "arguments": '{"id": "B1"}'},))
    message = one.corrected()
    assert (message.role, message.content, message.span) == ("assistant", "", None)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("look_up", '{"id": "B1"}')]
