"""Form `ground_truth`: a prompt and its true answer, which is the message to learn."""

from __future__ import annotations

from collections.abc import Sequence

from components.data.columns import RowColumns
from components.data.examples import DataExample
from components.data.forms.base import Form, Records, conversation, prompt_messages
from components.data.forms.thumbs import GOOD_FROM
from components.data.forms.writing import labels, plain_or_messages, prompt_length, single
from components.trajectories.schema import Message, Trajectory


def _read(columns: RowColumns) -> DataExample:
    answer = Message("assistant", columns.text("ground_truth"))
    return DataExample([conversation([*prompt_messages(columns.need("prompt")), answer])])


def _write(group: Sequence[Trajectory]) -> Records:
    """Yield one row: the best of the good answers that are one text. Other scenarios give no row."""
    answers = []
    for trajectory, messages in single(group):
        cut = prompt_length(messages)
        answer = plain_or_messages(messages[cut:], "assistant")
        if isinstance(answer, str) and (trajectory.reward or 0.0) >= GOOD_FROM:
            answers.append((trajectory, messages[:cut], answer))
    if answers:
        best, prompt, answer = max(answers, key=lambda item: item[0].reward or 0.0)
        yield {**labels(best), "prompt": plain_or_messages(prompt, "user"), "ground_truth": answer}


FORM = Form(
    "ground_truth",
    "a prompt and its true answer; to learn from rewards instead: environment=dataset",
    {
        "prompt": ("prompt", "question", "problem", "query"),
        "ground_truth": ("ground_truth", "answer", "solution", "target"),
    },
    _read,
    _write,
)
