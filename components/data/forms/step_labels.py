"""Form `step_labels`: a conversation, or a prompt and a list of steps, with a label for each step.

The labels are the step rewards of the episode, and its components `labelled/0`, `labelled/1` and so on, which the head
`labelled` of a process reward model learns. Each step of a list is one assistant message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from components.data.columns import RowColumns, as_number
from components.data.examples import STEP_LABELS as LABELLED
from components.data.examples import DataExample, RowProblem
from components.data.forms.base import Form, Records, conversation, prompt_messages
from components.data.forms.writing import labels, openai_messages, single
from components.data.messages import answer, read_messages
from components.trajectories.schema import Message, Trajectory


def _read_step_labels(columns: RowColumns) -> DataExample:
    values = [as_number(value) for value in columns.items("labels")]
    if columns.get("messages") is not None:
        messages = read_messages(columns.get("messages"))
    else:
        messages = [*prompt_messages(columns.need("prompt")), *map(_step, columns.items("steps"))]
    rewards, steps = [value for value in values if value is not None], _steps(messages)
    if len(rewards) < len(values):
        raise RowProblem("labels: expected a number, true or false for each step", fits=True)
    if steps != len(rewards):
        raise RowProblem(f"{len(rewards)} labels for {steps} steps", fits=True)
    reward = columns.number("reward")
    candidate = conversation(messages, math.fsum(rewards) if reward is None else reward)
    candidate.step_rewards, candidate.step_labels = rewards, {LABELLED: rewards}
    return DataExample([candidate])


def _steps(messages: Sequence[Message]) -> int:
    return sum(message.role == "assistant" for message in messages)


def _step(text: object) -> Message:
    if not isinstance(text, str):
        raise RowProblem("steps: expected a list of texts")
    return answer(text)


def _expresses(trajectory: Trajectory, messages: Sequence[Message]) -> bool:
    return _steps(messages) == len(trajectory.step_rewards)


def _write_step_labels(group: Sequence[Trajectory]) -> Records:
    """Yield a row of each episode whose assistant messages all have a step reward, of the judge or the environment."""
    for trajectory, messages in single(group):
        if _expresses(trajectory, messages):
            yield {
                **labels(trajectory),
                "messages": openai_messages(messages),
                "labels": trajectory.step_rewards,
                "reward": trajectory.reward,
            }


STEP_LABELS = Form(
    "step_labels",
    "a conversation, or a prompt and its steps, with a label for each step",
    {"labels": ("labels", "step_labels")},
    _read_step_labels,
    _write_step_labels,
    {
        "prompt": ("prompt", "question", "problem"),
        "steps": ("completions", "steps"),
        "messages": ("messages",),
    },
    expresses=_expresses,
)
