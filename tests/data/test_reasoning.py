"""Reasoning of imported answers: where rows have it, where it is placed, and how it is exported."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from components.data.examples import DataExample, RowProblem
from components.data.forms import FORMS
from components.data.forms.writing import sharegpt_value
from components.trajectories.schema import History, Message, Scenario, ToolCall, Trajectory

TAGGED = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
CALL = {"function": {"name": "look", "arguments": "{}"}}


def openai(**keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **keys}]}


def sharegpt(value: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": value}]}


ROWS: dict[str, tuple[str, dict[str, Any], tuple[str | None, str, int]]] = {
    "DeepSeek's and vLLM's key": ("messages", openai(content="a", reasoning_content="why"), ("why", "a", 0)),
    "OpenRouter's key": ("messages", openai(content="a", reasoning="why"), ("why", "a", 0)),
    "TRL's key, before a call": ("messages", openai(content=None, tool_calls=[CALL], thinking="why"), ("why", "", 1)),
    "an empty key": ("messages", openai(content="a", reasoning_content="", thinking=None), (None, "a", 0)),
    "Anthropic's parts": (
        "messages",
        openai(content=[{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "a"}]),
        ("why", "a", 0),
    ),
    "Mistral's parts": (
        "messages",
        openai(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "why"}]}, "a"]),
        ("why", "a", 0),
    ),
    "LangChain's parts": (
        "messages",
        openai(content=[{"type": "reasoning", "reasoning": "why"}, {"type": "text", "text": "a"}]),
        ("why", "a", 0),
    ),
    "OpenAI's summary": (
        "messages",
        openai(
            content=[{"type": "reasoning", "content": [], "summary": [{"type": "summary_text", "text": "why"}]}, "a"]
        ),
        ("why", "a", 0),
    ),
    "Anthropic's part without thoughts": (
        "messages",
        openai(content=[{"type": "thinking", "thinking": "", "signature": "x"}, "a"]),
        ("", "a", 0),
    ),
    "a flag": ("messages", openai(content="a", thinking=True), (None, "a", 0)),
    "text": ("prompt_completion", {"prompt": "q", "completion": "<think>\nwhy\n</think>\n\na"}, ("why", "a", 0)),
    "text of a message": ("messages", openai(content="<think>why</think>a"), ("why", "a", 0)),
    "a call that is weighed and rejected": (
        "sharegpt",
        sharegpt(f"<think>{TAGGED}? No.</think>a"),
        (f"{TAGGED}? No.", "a", 0),
    ),
    "a call after reasoning": ("sharegpt", sharegpt(f"<think>why</think>{TAGGED}"), ("why", "", 1)),
    "marks within an answer": (
        "sharegpt",
        sharegpt("Write <think>why</think>."),
        (None, "Write <think>why</think>.", 0),
    ),
    "reasoning without an end": ("sharegpt", sharegpt("<think>why"), (None, "<think>why", 0)),
}


def test_reasoning_of_a_row_is_a_field_of_its_message(subtests):
    for name, (form, row, expected) in ROWS.items():
        with subtests.test(name):
            message = FORMS[form].example(row, {}).candidates[0].messages[-1]
            assert (message.reasoning, message.content, len(message.tool_calls)) == expected


def test_reasoning_that_is_no_text_fails_the_row():
    with pytest.raises(RowProblem, match="message 1: reasoning is not text"):
        FORMS["messages"].example(openai(content="a", reasoning={"effort": "low"}), {})
    with pytest.raises(RowProblem, match="message 1 has a part of type 'reasoning' without text"):
        FORMS["messages"].example(openai(content=[{"type": "reasoning", "id": "x"}, "a"]), {})


def test_reasoning_is_placed_in_the_field_in_the_text_or_nowhere():
    def placed(place: Any) -> tuple[str | None, str, DataExample]:
        example = FORMS["messages"].example(openai(content="a", reasoning_content="why"), {})
        example.place_reasoning(place)
        return example.candidates[0].messages[-1].reasoning, example.candidates[0].messages[-1].content, example

    assert placed("field")[:2] == ("why", "a")
    assert placed("text")[:2] == (None, "<think>\nwhy\n</think>\n\na")
    assert placed("drop")[:2] == (None, "a")
    assert len({placed(place)[2].content() for place in ("field", "text", "drop")}) == 3
    assert len({placed(place)[2].text() for place in ("field", "drop")}) == 2, "compared with similar rows"


def test_reasoning_that_is_cut_off_is_exported_without_an_end():
    cut = Message("assistant", "", reasoning="why", finish_reason="length")
    assert [sharegpt_value(cut), sharegpt_value(replace(cut, content="a"))] == [
        "<think>\nwhy",
        "<think>\nwhy\n</think>\n\na",
    ]


def test_exported_reasoning_is_imported_again(subtests):
    def episode(number: int, reward: float) -> Trajectory:
        messages = [
            Message("user", "q"),
            Message("assistant", "", [ToolCall("c", "look", "{}")], reasoning=f"first {number}"),
            Message("tool", "r", tool_call_id="c"),
            Message("assistant", f"{number}", reasoning=f"second {number}"),
        ]
        scenario, tools = Scenario("s", {}, "train"), [{"type": "function", "function": {"name": "look"}}]
        steps = [0.5, 0.5]
        return Trajectory(
            f"s/{number}", scenario, number, [History(messages)], tools, step_rewards=steps, policy="p", reward=reward
        )

    episodes = [episode(1, 1.0), episode(2, 0.0)]
    for form, declared in FORMS.items():
        if declared.write is None or form == "ground_truth":  # the true answer has no reasoning
            continue
        with subtests.test(form):
            row = json.loads(json.dumps(next(iter(declared.write(episodes)))))
            example = declared.example(row, {})
            for number, candidate in enumerate(example.candidates, 1):
                answers = [message for message in candidate.messages if message.role == "assistant"]
                assert [answer.reasoning for answer in answers] == [f"first {number}", f"second {number}"]
                assert [answer.content for answer in answers] == ["", f"{number}"]
            if "messages" in row:
                assert row["messages"][1]["reasoning_content"] == "first 1"
