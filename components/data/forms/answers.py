"""Forms of an answer to a prompt.

prompt_completion    the answer to learn, text or messages; also with the columns instruction, input and output
thumbs               an answer, or a conversation, with a label: good or bad
ground_truth         the true answer, which is the message to learn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from components.data.columns import RowColumns
from components.data.examples import DataExample, RowProblem
from components.data.forms.base import Form, Records, completion_messages, conversation, prompt_messages
from components.data.forms.writing import labels, plain_or_messages, prompt_length, single
from components.data.messages import answer, read_messages
from components.trajectories.schema import Trajectory


def _read_prompt_completion(columns: RowColumns) -> DataExample:
    prompt = columns.need("prompt")
    context = columns.get("context")
    if isinstance(prompt, str) and isinstance(context, str) and context.strip():
        prompt = f"{prompt}\n{context}"
    reward = columns.number("reward")
    messages = [*prompt_messages(prompt), *completion_messages(columns.need("completion"))]
    return DataExample([conversation(messages, 1.0 if reward is None else reward)])


def _write_prompt_completion(group: Sequence[Trajectory]) -> Records:
    for trajectory, messages in single(group):
        cut = prompt_length(messages)
        yield {
            **labels(trajectory),
            "prompt": plain_or_messages(messages[:cut], "user"),
            "completion": plain_or_messages(messages[cut:], "assistant"),
            "reward": trajectory.reward,
        }


PROMPT_COMPLETION = Form(
    "prompt_completion",
    "a prompt and the answer to learn, as text or messages; also instruction, input, output",
    {"prompt": ("prompt", "instruction", "question", "query"), "completion": ("completion", "output", "response")},
    _read_prompt_completion,
    _write_prompt_completion,
    {"context": ("input",)},
)


GOOD_FROM = 0.5
"""Reward from which an exported answer is good."""
_GOOD = "true 1 1.0 +1 yes y up good positive correct right accepted accept approved like liked helpful pass passed 👍"
_BAD = "false 0 0.0 -1 -1.0 no n down bad negative incorrect wrong rejected reject dislike disliked unhelpful failed 👎"
LABELS = {**dict.fromkeys(_GOOD.split(), True), **dict.fromkeys(_BAD.split(), False)}
"""Labels as text, in lower case, and whether the answer is good."""
LABEL_COLUMNS = (
    *("label", "thumb", "thumbs", "thumbs_up", "is_good", "good", "is_correct", "correct", "is_accepted", "accepted"),
    *("is_helpful", "helpful", "is_positive", "liked", "like", "upvoted", "vote", "feedback", "rating", "passed"),
)
"""Common names of the column with the label, in order of preference."""


def _read_thumbs(columns: RowColumns) -> DataExample:
    good = _label(columns.need("label"))
    if columns.get("messages") is not None:
        messages = read_messages(columns.get("messages"))
    else:
        messages = [*prompt_messages(columns.need("prompt")), *completion_messages(columns.need("completion"))]
    return DataExample([conversation(messages, float(good))])


def _label(value: Any) -> bool:
    good = LABELS.get(str(value).strip().lower())
    if good is None:
        raise RowProblem(f"label {value!r:.40}: expected true or false, 1 or 0, up or down, good or bad")
    return good


def _write_thumbs(group: Sequence[Trajectory]) -> Records:
    for trajectory, messages in single(group):
        cut = prompt_length(messages)
        yield {
            **labels(trajectory),
            "prompt": plain_or_messages(messages[:cut], "user"),
            "completion": plain_or_messages(messages[cut:], "assistant"),
            "label": (trajectory.reward or 0.0) >= GOOD_FROM,
        }


THUMBS = Form(
    "thumbs",
    "an answer to a prompt, or a conversation, with a label: good or bad",
    {"label": LABEL_COLUMNS},
    _read_thumbs,
    _write_thumbs,
    {
        "prompt": ("prompt", "question", "instruction", "query"),
        "completion": ("completion", "response", "output", "answer"),
        "messages": ("messages", "conversations", "conversation", "dialogue"),
    },
    thumb="label",
)


def _read_ground_truth(columns: RowColumns) -> DataExample:
    true = answer(columns.text("ground_truth"))
    return DataExample([conversation([*prompt_messages(columns.need("prompt")), true])])


def _write_ground_truth(group: Sequence[Trajectory]) -> Records:
    """Yield one row: the best of the good answers that are one text, without reasoning. Other scenarios give no
    row."""
    answers = []
    for trajectory, messages in single(group):
        cut = prompt_length(messages)
        text = plain_or_messages([replace(message, reasoning=None) for message in messages[cut:]], "assistant")
        if isinstance(text, str) and (trajectory.reward or 0.0) >= GOOD_FROM:
            answers.append((trajectory, messages[:cut], text))
    if answers:
        best, prompt, text = max(answers, key=lambda item: item[0].reward or 0.0)
        yield {**labels(best), "prompt": plain_or_messages(prompt, "user"), "ground_truth": text}


GROUND_TRUTH = Form(
    "ground_truth",
    "a prompt and its true answer; to learn from rewards instead: environment=dataset",
    {
        "prompt": ("prompt", "question", "problem", "query"),
        "ground_truth": ("ground_truth", "answer", "solution", "target"),
    },
    _read_ground_truth,
    _write_ground_truth,
)
