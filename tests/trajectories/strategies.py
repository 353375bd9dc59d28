"""Hypothesis strategies for all stored types."""

from __future__ import annotations

from hypothesis import strategies as st

from components.trajectories.schema import Failure, History, Message, Scenario, Score, Selection, ToolCall, Trajectory

# Everything that a Python string can hold: lone surrogates, and the character that escapes them, included.
text = st.text(st.characters() | st.sampled_from("\ud83d\ude00\ufdd0\x00\u2028é漢🙂a0d"), max_size=12)
number = st.floats()
int32 = st.integers(-(2**31), 2**31 - 1)
json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
json_dicts = st.dictionaries(text, json_data, max_size=3)
numbers = st.dictionaries(text, number, max_size=3)
failures = st.none() | st.builds(Failure, text, text, text)

messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=text,
    tool_calls=st.lists(st.builds(ToolCall, text, text, text), max_size=2),
    tool_call_id=st.none() | text,
    span=st.none() | st.tuples(int32, int32),
    finish_reason=st.none() | text,
)
histories = st.builds(
    History,
    messages=st.lists(messages, max_size=3),
    token_ids=st.lists(int32, max_size=6),
    logprobs=st.lists(st.floats(width=32), max_size=6),
    agent=text,
)
trajectories = st.builds(
    Trajectory,
    id=text,
    scenario=st.builds(Scenario, id=text, input=json_dicts, split=text, type=text, difficulty=int32),
    sample=int32,
    histories=st.lists(histories, max_size=3),
    tools=st.lists(json_dicts, max_size=2),
    step_rewards=st.lists(number, max_size=3),
    outcome=json_dicts,
    metrics=numbers,
    failure=failures,
    policy=text,
    sampling=json_dicts,
    reward=st.none() | number,
    advantage=st.none() | number,
)
scores = st.builds(
    Score,
    trajectory_id=text,
    reward=st.none() | number,
    components=numbers,
    step_rewards=st.lists(number, max_size=3),
    explanation=text,
    cost=number,
    failure=failures,
)
selections = st.builds(Selection, trajectory_id=text, kept=st.booleans(), reason=text)
