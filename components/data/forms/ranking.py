"""Form `ranking`: a prompt and several answers, from the best to the worst, or with their scores."""

from __future__ import annotations

from components.data.columns import RowColumns
from components.data.examples import DataExample, RowProblem
from components.data.forms.base import Form, completion_messages, conversation, prompt_messages


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


FORM = Form(
    "ranking",
    "a prompt and a list of answers, best first or with scores",
    {
        "prompt": ("prompt", "question", "instruction"),
        "ranked": ("ranked", "ranking", "responses", "answers", "completions"),
    },
    _read,
    more={"scores": ("scores", "ratings")},
)
