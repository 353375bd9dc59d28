"""Form `trajectories`: the project's own Parquet of episodes, as `flows.runs export --form parquet` writes it.

The messages, tools, scenarios and rewards are imported. Sampled tokens and log-probabilities are not: they belong to
the tokenizer and the policy of the run. A message that the policy did not sample in its history is context.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from components.data.columns import RowColumns
from components.data.examples import STEP_LABELS, Candidate, DataExample, RowProblem
from components.data.forms.base import Form
from components.trajectories import decode, tables
from components.trajectories.schema import History, Trajectory


def _read_trajectories(columns: RowColumns) -> DataExample:
    row = {field.name: columns.get(field.name) for field in tables.TRAJECTORY_SCHEMA}
    try:
        (trajectory,) = decode.trajectories(pa.RecordBatch.from_pylist([row], schema=tables.TRAJECTORY_SCHEMA))
    except (pa.ArrowException, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RowProblem(f"no trajectory in the format of this version: {error}") from None
    if trajectory.failure is not None:
        raise RowProblem(f"the episode failed: {trajectory.failure.kind}", "empty")
    scenario = trajectory.scenario
    candidate = Candidate(
        [_written(history, trajectory) for history in trajectory.histories],
        trajectory.reward,
        list(trajectory.step_rewards),
        {STEP_LABELS: list(trajectory.step_rewards)},
        trajectory.id,
    )
    return DataExample(
        [candidate],
        tools=trajectory.tools,
        type=scenario.type,
        difficulty=scenario.difficulty,
        group=scenario.id,
    )


def _written(history: History, trajectory: Trajectory) -> History:
    """Return a history without its tokens."""
    sampled = bool(history.token_ids)
    messages = [
        replace(
            message,
            span=None,
            finish_reason=None,
            trained=message.trained and (message.role != "assistant" or not sampled or message.span is not None),
        )
        for message in history.messages
    ]
    return History(messages, agent=history.agent)


_COLUMNS: dict[str, Any] = {field.name: (field.name,) for field in tables.TRAJECTORY_SCHEMA if not field.nullable}

TRAJECTORIES = Form(
    "trajectories",
    "episodes of a run in the project's own Parquet",
    _COLUMNS,
    _read_trajectories,
    more={field.name: (field.name,) for field in tables.TRAJECTORY_SCHEMA if field.nullable},
)
