"""Form `ground_truth`: a prompt and its true answer, which is the message to learn."""

from __future__ import annotations

from components.data.columns import RowColumns
from components.data.examples import DataExample
from components.data.forms.base import Form, conversation, prompt_messages
from components.trajectories.schema import Message


def _read(columns: RowColumns) -> DataExample:
    answer = Message("assistant", columns.text("ground_truth"))
    return DataExample([conversation([*prompt_messages(columns.need("prompt")), answer])])


FORM = Form(
    "ground_truth",
    "a prompt and its true answer; to learn from rewards instead: environment=dataset",
    {
        "prompt": ("prompt", "question", "problem", "query"),
        "ground_truth": ("ground_truth", "answer", "solution", "target"),
    },
    _read,
)
