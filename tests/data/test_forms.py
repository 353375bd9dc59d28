"""Each form gives the conversations that its rows hold; `auto` recognises it."""

from __future__ import annotations

import json
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data.examples import DataExample, RowProblem
from components.data.forms import FORMS, recognise
from components.data.sources import rows
from components.data.spec import FormName, SourceSpec
from components.trajectories.schema import ToolCall
from tests.data import rows as samples

TEXT = st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
KEYS = sorted({name for form in FORMS.values() for names in (form.columns, form.more) for name in names})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["system", "user", "assistant", "tool", "bishop"]) | VALUES,
            "from": st.sampled_from(["human", "gpt", "function_call"]) | VALUES,
            "content": TEXT | VALUES,
            "value": TEXT | VALUES,
            "tool_calls": VALUES | st.just([{"function": {"name": "f", "arguments": "{}"}}]),
            "loss": VALUES,
        },
    ),
    max_size=4,
)


def example(values: dict, form: str = "auto", **mapped: str) -> DataExample:
    """Return the example of a row, of the recognised form."""
    name = recognise([values], mapped) if form == "auto" else form
    assert name is not None
    return FORMS[name].example(values, mapped)


def turns(read: DataExample, candidate: int = 0) -> list[tuple[str, str, bool]]:
    """Return role, text and training of each message."""
    return [(message.role, message.content, message.trained) for message in read.candidates[candidate].messages]


def test_the_names_of_forms_are_those_of_the_spec():
    assert {"auto", *FORMS} == set(get_args(FormName))


def test_rows_of_each_form_are_recognised_also_as_tables_and_text(tmp_path, subtests):
    for form in samples.FORMS:
        with subtests.test(form=form):
            content = samples.FORMS[form]
            assert recognise(content, {}) == form
            pq.write_table(pa.Table.from_pylist(content), tmp_path / "a.parquet")
            as_table = [row.values for row in rows(SourceSpec(path=str(tmp_path / "a.parquet")))]
            as_text = [
                {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
                for row in content
            ]
            assert recognise(as_table, {}) == recognise(as_text, {}) == form
            expected = [FORMS[form].example(row, {}).content() for row in content]
            assert [FORMS[form].example(row, {}).content() for row in as_table] == expected
            assert [FORMS[form].example(row, {}).content() for row in as_text] == expected


def test_openai_messages_keep_calls_results_and_tools():
    read = example(samples.FORMS["messages"][2])
    assert read.tools == [samples.WEATHER]
    _, user, call, result, answer = read.candidates[0].messages
    assert user.content == "Weather in town 2?"
    assert call.tool_calls == [ToolCall("c1", "weather", '{"city": "town 2"}')]
    assert (result.role, result.tool_call_id) == ("tool", "c1")
    assert answer.content == "It has 2 degrees."


def test_messages_of_other_ages_and_shapes_are_read():
    read = example(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "skip", "weight": 0},
                {"role": "user", "content": "q"},
                {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
                {"role": "function", "name": "f", "content": "r"},
                {"role": "assistant", "content": "done"},
            ],
            "tools": json.dumps([{"name": "f", "parameters": None}]),
            "reward": 0.25,
        }
    )
    assert turns(read)[:3] == [("system", "ab", True), ("user", "q", True), ("assistant", "skip", False)]
    assert read.candidates[0].messages[4].tool_calls == [ToolCall("call_4_0", "f", "{}")]
    assert read.candidates[0].messages[5].tool_call_id == "call_4_0"
    assert read.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert read.candidates[0].reward == 0.25


def test_sharegpt_calls_are_read_from_tags_and_from_entries_of_their_own():
    tagged = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    read = example(
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": f"Wait.\n{tagged}"},
                {"from": "tool", "value": "r"},
                {"from": "function_call", "value": '{"name": "g", "arguments": {}}'},
                {"from": "observation", "value": "s"},
                {"from": "gpt", "value": "<tool_call>broken"},
            ],
            "system": "Be brief.",
        }
    )
    assert [message.role for message in read.candidates[0].messages] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "assistant")
    ]
    first, second = (read.candidates[0].messages[place] for place in (2, 4))
    assert (first.content, first.tool_calls) == ("Wait.", [ToolCall("call_1_0", "f", '{"a": 1}')])
    assert second.tool_calls == [ToolCall("call_3_0", "g", "{}")]
    assert read.candidates[0].messages[-1].content == "<tool_call>broken"


def test_agenttraj_trains_on_messages_with_loss_only():
    read = example(samples.FORMS["agenttraj"][3])
    assert read.name == "shop_3"
    assert [trained for role, _, trained in turns(read) if role == "assistant"] == [False, True]


def test_preference_pairs_have_explicit_and_implicit_prompts(subtests):
    for values, prompt, chosen, rejected in [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, [("user", "q", True)], "a", "b"),
        (
            {
                "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
            },
            [("user", "q", True)],
            "a",
            "b",
        ),
        (
            {
                "prompt": [{"role": "user", "content": "q"}],
                "chosen": [{"role": "assistant", "content": "a"}],
                "rejected": [{"role": "assistant", "content": "b"}],
            },
            [("user", "q", True)],
            "a",
            "b",
        ),
        (
            {
                "chosen": "\n\nHuman: q\n\nAssistant: x\n\nHuman: r\n\nAssistant: a",
                "rejected": "\n\nHuman: q\n\nAssistant: x\n\nHuman: r\n\nAssistant: b",
            },
            [("user", "q", True), ("assistant", "x", False), ("user", "r", True)],
            "a",
            "b",
        ),
        (
            {"chosen": "The sky is deep blue", "rejected": "The sky is dark"},
            [("user", "The sky is", True)],
            "deep blue",
            "dark",
        ),
    ]:
        with subtests.test(values=values):
            read = example(values)
            assert turns(read, 0) == [*prompt, ("assistant", chosen, True)]
            assert turns(read, 1) == [*prompt, ("assistant", rejected, True)]
            assert [candidate.reward for candidate in read.candidates] == [1.0, 0.0]


def test_scores_of_a_pair_are_used_where_they_agree_with_it():
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for scores, expected in {(0.9, 0.2): [0.9, 0.2], (0.2, 0.9): [1.0, 0.0]}.items():
        read = example({**pair, "score_chosen": scores[0], "score_rejected": scores[1]})
        assert [candidate.reward for candidate in read.candidates] == expected


def test_a_score_that_is_no_number_is_refused_and_not_replaced_by_the_best_score():
    answer, pair = {"prompt": "q", "completion": "a"}, {"prompt": "q", "chosen": "a", "rejected": "b"}
    for row in ({**answer, "reward": "high"}, {**answer, "score": float("nan")}, {**pair, "score_chosen": "five"}):
        with pytest.raises(RowProblem, match=f"column '{list(row)[-1]}': expected a finite number"):
            example(row)
    for row in ({**answer, "reward": ""}, {**answer, "difficulty": "hard"}):
        assert example(row).candidates[0].reward == 1.0


def test_ranked_lists_descend_from_one_to_zero_or_have_scores():
    row = {"prompt": "q", "responses": ["a", "b", "c"]}
    assert [candidate.reward for candidate in example(row).candidates] == [1.0, 0.5, 0.0]
    assert [candidate.reward for candidate in example({**row, "scores": [2, 7, 1]}).candidates] == [2.0, 7.0, 1.0]


def test_thumbs_are_read_in_common_spellings():
    cases = {
        True: 1,
        0: 0,
        "up": 1,
        "False": 0,
        -1: 0,
        "1": 1,
    }
    assert {
        label: example({"prompt": "q", "completion": "a", "label": label}).candidates[0].reward for label in cases
    } == cases


def test_step_labels_are_the_step_rewards_and_components():
    read = example(samples.FORMS["step_labels"][0])
    ((trajectory, score),) = read.scored(7, "train")
    assert score.step_rewards == [1.0, 0.0]
    assert score.components == {"labelled/0": 1.0, "labelled/1": 0.0}
    assert score.reward == 1.0
    assert trajectory.policy == "imported"


TRAJECTORY = """
{
  "task_id": "webshop_7", "task_type": "web_browsing", "instruction": "Buy a mug below 10 dollars.",
  "steps": [
    {"thought": "I need to search.", "action": "search", "action_input": {"query": "mug"},
     "observation": "[B01] Mug, 8 dollars", "reward": 0.0},
    {"thought": "It fits.", "action": "click", "action_input": "B01", "observation": "Bought.", "reward": 1.0},
    {"thought": "", "action": "Answer", "action_input": "Done.", "observation": "", "reward": null}
  ],
  "final_reward": 1.0, "metadata": {"env": "webshop", "num_steps": 3}
}
"""
"""An episode as agents of tutorials save it."""
QUALITIES = """
{
  "instruction": "Buy a mug.",
  "steps": [
    {"thought": "I need to search.", "action": "search[mug]", "quality": 0.8},
    {"thought": "It fits.", "action": "click[B01]", "quality": 0.6}
  ]
}
"""


def test_steps_are_react_messages_with_observations_and_rewards():
    read = example(json.loads(TRAJECTORY))
    assert turns(read) == [
        ("user", "Buy a mug below 10 dollars.", True),
        ("assistant", 'Thought: I need to search.\nAction: search {"query": "mug"}', True),
        ("user", "Observation: [B01] Mug, 8 dollars", True),
        ("assistant", "Thought: It fits.\nAction: click\nAction Input: B01", True),
        ("user", "Observation: Bought.", True),
        ("assistant", "Answer: Done.", True),
    ]
    assert (read.name, read.type, read.candidates[0].reward) == ("webshop_7", "web_browsing", 1.0)
    assert read.input == {"metadata": {"env": "webshop", "num_steps": 3}}
    ((_, score),) = read.scored(1, "train")
    assert (score.step_rewards, score.components) == ([0.0, 1.0, 0.0], {})


def test_steps_of_a_row_with_tools_are_calls():
    row = json.loads(TRAJECTORY)
    row["steps"].pop(1)
    tool = {"type": "function", "function": {"name": "search", "parameters": {}}}
    read = example({**row, "final_reward": 0, "tools": [tool]})
    _, call, result, last = read.candidates[0].messages
    assert (call.content, call.tool_calls) == (
        "I need to search.",
        [ToolCall("call_0", "search", '{"query": "mug"}')],
    )
    assert (result.role, result.content, result.tool_call_id) == ("tool", "[B01] Mug, 8 dollars", "call_0")
    assert last.content == "Done."


def test_qualities_and_three_scores_of_steps_are_labels_of_the_heads(subtests):
    row = json.loads(QUALITIES)
    scores = [
        {"relevance": 1, "correctness": 0.5, "progress": 0},
        {"relevance": 0.9, "correctness": 0.9, "progress": 0.9},
    ]
    beside = {**row, "steps": [step | score for step, score in zip(row["steps"], scores, strict=True)]}
    within = {**row, "steps": [step | {"quality": score} for step, score in zip(row["steps"], scores, strict=True)]}
    three = {f"{name}/{number}": float(value) for number, score in enumerate(scores) for name, value in score.items()}
    for values, labelled in [(row, [0.8, 0.6]), (beside, [0.8, 0.6]), (within, [0.5, 0.9])]:
        with subtests.test(values=values):
            ((_, score),) = example(values).scored(1, "train")
            own = {f"labelled/{number}": label for number, label in enumerate(labelled)}
            assert score.components == pytest.approx(own if values is row else own | three)
            assert score.step_rewards == pytest.approx(labelled)
            assert score.reward == pytest.approx(sum(labelled))


def test_rewards_that_are_all_zero_are_no_step_rewards():
    row = json.loads(TRAJECTORY)
    row["steps"][1]["reward"] = 0.0
    (candidate,) = example(row).candidates
    assert (candidate.reward, candidate.step_rewards) == (1.0, [])


def test_columns_are_mapped_and_the_others_become_the_input():
    read = example({"q": "a", "a": "b", "level": "hard", "n": 3}, prompt="q", completion="a", type="level")
    assert turns(read) == [("user", "a", True), ("assistant", "b", True)]
    assert read.type == "hard"
    assert read.input == {"n": 3}


MALFORMED = [
    ("messages", {"messages": "text"}, "expected a list of messages", "malformed"),
    ("messages", {"messages": []}, "there are no messages", "empty"),
    ("messages", {"messages": [{"role": "bishop", "content": "a"}]}, "role 'bishop'", "malformed"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url", "malformed"),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "without the name", "malformed"),
    (
        "messages",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "not a JSON object",
        "malformed",
    ),
    ("messages", {"messages": samples.openai(1), "tools": [3]}, "tools: expected", "malformed"),
    ("prompt_completion", {"prompt": " ", "completion": "a"}, "prompt is empty", "empty"),
    ("prompt_completion", {"prompt": "a"}, "'completion' is missing", "malformed"),
    ("ground_truth", {"prompt": "a", "answer": ""}, "'ground_truth' is empty", "empty"),
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "a"}, "are equal", "malformed"),
    ("preference", {"chosen": "a", "rejected": "b"}, "there is no prompt", "malformed"),
    ("ranking", {"prompt": "q", "responses": ["a"]}, "at least two", "malformed"),
    ("ranking", {"prompt": "q", "responses": ["a", "b"], "scores": [1]}, "1 scores for 2", "malformed"),
    ("thumbs", {"prompt": "q", "completion": "a", "label": "maybe"}, "expected true or false", "malformed"),
    ("step_labels", {"prompt": "q", "completions": ["a"], "labels": [1, 0]}, "2 labels for 1 steps", "malformed"),
    (
        "steps",
        {
            "instruction": "q",
            "steps": [{"action": "a", "reward": 0.5}, {"action": "b", "reward": 0.25}],
            "final_reward": 1,
        },
        "the rewards of the steps add up to 0.75, but final_reward is 1",
        "malformed",
    ),
    ("steps", {"instruction": "q", "steps": [{"action": "a"}], "final_reward": "won"}, "final_reward", "malformed"),
    ("steps", {"instruction": "q", "steps": ["a"]}, "step 0: expected an object", "malformed"),
    (
        "steps",
        {"instruction": "q", "steps": [{"thought": "a", "quality": 1}, {"thought": "b"}]},
        r"step 1: expected the labels of step 0 \(labelled\)",
        "malformed",
    ),
]


def test_rows_that_lack_something_say_what(subtests):
    for form, values, reason, check in MALFORMED:
        with subtests.test(values=values):
            with pytest.raises(RowProblem, match=reason) as problem:
                FORMS[form].example(values, {})
            assert problem.value.check == check


def test_a_mapped_column_that_is_missing_is_named():
    with pytest.raises(RowProblem, match=r"no column 'q', which data\.columns\.prompt names"):
        FORMS["prompt_completion"].example({"prompt": "a", "completion": "b"}, {"prompt": "q"})


@given(values=st.dictionaries(st.sampled_from(KEYS) | TEXT, VALUES | MESSAGES, max_size=6))
def test_hostile_rows_give_an_example_or_a_row_problem(values):
    for form in FORMS.values():
        try:
            read = form.example(values, {})
        except RowProblem:
            continue
        assert read.candidates
        assert read.content()
        assert list(read.scored(1, "train"))
