"""Form `ranking`: a prompt and several answers, from the best to the worst, or with their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.data.columns import RowColumns
from components.data.examples import DataExample, RowProblem
from components.data.forms.base import Form, Records, completion_messages, conversation, prompt_messages
from components.data.forms.writing import labels, plain_or_messages, prompt_length, shared_length, single
from components.trajectories.groups import have_spread
from components.trajectories.schema import Trajectory


def _read(columns: RowColumns) -> DataExample:
    answers = columns.items("ranked")
    if len(answers) < 2:
        raise RowProblem("a ranked list needs at least two answers")
    if columns.get("scores") is not None:
        rewards = columns.numbers("scores")
    else:
        rewards = [1 - place / (len(answers) - 1) for place in range(len(answers))]
    if len(rewards) != len(answers):
        raise RowProblem(f"{len(rewards)} scores for {len(answers)} answers")
    prompt = columns.need("prompt")
    return DataExample(
        [
            conversation([*prompt_messages(prompt), *completion_messages(answer)], reward)
            for answer, reward in zip(answers, rewards, strict=True)
        ]
    )


def _write(group: Sequence[Trajectory]) -> Records:
    """Yield one row of a scenario's episodes, best first. Episodes of equal rewards rank nothing: they give no row."""
    episodes = sorted(single(group), key=lambda item: -(item[0].reward or 0.0))
    rewards = [trajectory.reward or 0.0 for trajectory, _ in episodes]
    if not have_spread(rewards):
        return
    best, messages = episodes[0]
    cut = min(prompt_length(messages), *(shared_length(messages, other) for _, other in episodes[1:]))
    ranked: list[Any] = [plain_or_messages(other[cut:], "assistant") for _, other in episodes]
    yield {
        **labels(best),
        "prompt": plain_or_messages(messages[:cut], "user"),
        "ranked": ranked,
        "scores": rewards,
    }


FORM = Form(
    "ranking",
    "a prompt and a list of answers, best first or with scores",
    {
        "prompt": ("prompt", "question", "instruction"),
        "ranked": ("ranked", "ranking", "responses", "answers", "completions"),
    },
    _read,
    _write,
    {"scores": ("scores", "ratings")},
)
