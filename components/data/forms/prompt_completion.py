"""Form `prompt_completion`: a prompt and the answer to learn, each text or messages; also with the columns instruction,
input and output."""

from __future__ import annotations

from collections.abc import Sequence

from components.data.columns import RowColumns
from components.data.examples import DataExample
from components.data.forms.base import Form, Records, completion_messages, conversation, prompt_messages
from components.data.forms.writing import labels, plain_or_messages, prompt_length, single
from components.trajectories.schema import Trajectory


def _read(columns: RowColumns) -> DataExample:
    prompt = columns.need("prompt")
    context = columns.get("context")
    if isinstance(prompt, str) and isinstance(context, str) and context.strip():
        prompt = f"{prompt}\n{context}"
    reward = columns.number("reward")
    messages = [*prompt_messages(prompt), *completion_messages(columns.need("completion"))]
    return DataExample([conversation(messages, 1.0 if reward is None else reward)])


def _write(group: Sequence[Trajectory]) -> Records:
    for trajectory, messages in single(group):
        cut = prompt_length(messages)
        yield {
            **labels(trajectory),
            "prompt": plain_or_messages(messages[:cut], "user"),
            "completion": plain_or_messages(messages[cut:], "assistant"),
            "reward": trajectory.reward,
        }


FORM = Form(
    "prompt_completion",
    "a prompt and the answer to learn, as text or messages; also instruction, input, output",
    {"prompt": ("prompt", "instruction", "question", "query"), "completion": ("completion", "output", "response")},
    _read,
    _write,
    {"context": ("input",)},
)
