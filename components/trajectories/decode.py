"""Reading of the storage format: from a batch of columns to objects.

Each column of a batch is converted as a whole, which is several times as fast as row by row.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from components.errors import ArtifactDamaged
from components.trajectories.schema import (
    Failure,
    History,
    Message,
    Scenario,
    Score,
    Selection,
    ToolCall,
    Trajectory,
)
from components.trajectories.tables import original_text

Value = TypeVar("Value")


def _plain(array: pa.Array) -> list[Any]:
    """Return numbers, booleans, or text without escaped characters, as Python values."""
    return array.to_numpy(zero_copy_only=False).tolist()


ROWS_PER_STEP = 256
"""Rows whose objects are in memory at a time."""
_VOCABULARY = 2**19
"""Token ids below this number are shared objects, which saves 32 bytes per token."""


@functools.cache
def _shared_ids() -> np.ndarray:
    return np.arange(_VOCABULARY).astype(object)


def _token_ids(array: pa.Array) -> list[int]:
    ids = array.to_numpy(zero_copy_only=False)
    if ids.size and ids.min() >= 0 and ids.max() < _VOCABULARY:
        shared: list[int] = _shared_ids()[ids].tolist()
        return shared
    return _plain(array)


def _logprobs(array: pa.Array) -> list[float]:
    """Return log-probabilities; those of tokens that were not sampled are one object."""
    values = array.to_numpy(zero_copy_only=False)
    shared = values.astype(object)
    shared[np.isnan(values)] = math.nan
    logprobs: list[float] = shared.tolist()
    return logprobs


def texts(array: pa.Array) -> list[str]:
    """Return the original texts of a column."""
    return [value if value.isascii() else original_text(value) for value in _plain(array)]


def _jsons(array: pa.Array) -> list[Any]:
    return [_parsed(value) for value in texts(array)]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ArtifactDamaged(
            "a table of episodes holds a value that is nested too deeply; Espalier did not write it"
        ) from None


def _shared_jsons(array: pa.Array) -> list[Any]:
    """Return parsed JSON values; equal values are one object."""
    index, values = distinct_jsons(array)
    return [values[place] for place in index.tolist()]


def distinct_jsons(array: pa.Array) -> tuple[Any, list[Any]]:
    """Return the distinct values of a column of JSON text, and an array with the position of each row's value."""
    encoded = array.dictionary_encode()
    return encoded.indices.to_numpy(), _jsons(encoded.dictionary)


def _optional(read: Callable[[pa.Array], list[Value]], array: pa.Array) -> list[Value | None]:
    if not array.null_count:
        return [*read(array)]
    values = iter(read(array.drop_null()))
    return [next(values) if valid else None for valid in _plain(array.is_valid())]


def _lists(read: Callable[[pa.Array], list[Value]], array: pa.Array) -> list[list[Value]]:
    """Return the lists of a list or map column without nulls."""
    if not len(array):
        return []
    offsets = array.offsets.to_numpy()  # a slice of an array has the values of the whole array
    first, last = offsets[0], offsets[-1]
    values = read(array.values[first:last])
    return [values[start:end] for start, end in pairwise((offsets - first).tolist())]


def _pairs(array: pa.Array) -> list[tuple[str, float]]:
    return list(zip(texts(array.field(0)), _plain(array.field(1)), strict=True))


def _numbers(array: pa.Array) -> list[dict[str, float]]:
    return [dict(pairs) for pairs in _lists(_pairs, array)]


def _failures(array: pa.Array) -> list[Failure]:
    return list(map(Failure, *(texts(array.field(name)) for name in ("boundary", "kind", "message"))))


def failures(batch: pa.RecordBatch) -> list[tuple[str, Failure]]:
    """Return id and failure of each failed trajectory."""
    failed = batch.filter(batch.column("failure").is_valid())
    return list(zip(texts(failed.column("id")), _failures(failed.column("failure")), strict=True))


def scenarios(array: pa.Array) -> list[Scenario]:
    """Return scenarios; equal scenarios are one object."""
    names = [texts(array.field(name)) for name in ("id", "input", "split", "type")]
    rows = list(zip(*names, _plain(array.field("difficulty")), strict=True))
    unique = {row: Scenario(row[0], _parsed(row[1]), *row[2:]) for row in set(rows)}
    return [unique[row] for row in rows]


def _tool_calls(array: pa.Array) -> list[ToolCall]:
    return list(map(ToolCall, *(texts(array.field(name)) for name in ("id", "name", "arguments"))))


def _spans(array: pa.Array) -> list[tuple[int, int]]:
    return list(zip(_plain(array.field("start")), _plain(array.field("end")), strict=True))


def _messages(array: pa.Array) -> list[Message]:
    columns = (
        _plain(array.field("role")),
        texts(array.field("content")),
        _lists(_tool_calls, array.field("tool_calls")),
        _optional(texts, array.field("tool_call_id")),
        _optional(_spans, array.field("span")),
        _optional(texts, array.field("finish_reason")),
        _trained(array),
        _reasoning(array),
    )
    return list(map(Message, *columns))


def _trained(array: pa.Array) -> list[bool]:
    if array.type.get_field_index("trained") < 0 or array.field("trained").null_count == len(array):
        return [True] * len(array)
    return [value is not False for value in array.field("trained").to_pylist()]


def _reasoning(array: pa.Array) -> list[str | None]:
    if array.type.get_field_index("reasoning") < 0:  # a file of before this column
        return [None] * len(array)
    return _optional(texts, array.field("reasoning"))


def _histories(array: pa.Array) -> list[History]:
    """Return histories; without tokens if these columns were not read."""
    token_ids: list[list[int]] = [[] for _ in range(len(array))]
    logprobs: list[list[float]] = [[] for _ in range(len(array))]
    if array.type.get_field_index("token_ids") >= 0:
        token_ids = _lists(_token_ids, array.field("token_ids"))
        logprobs = _lists(_logprobs, array.field("logprobs"))
    return list(
        map(History, _lists(_messages, array.field("messages")), token_ids, logprobs, texts(array.field("agent")))
    )


def trajectories(batch: pa.RecordBatch) -> Iterable[Trajectory]:
    columns = (
        texts(batch.column("id")),
        scenarios(batch.column("scenario")),
        _plain(batch.column("sample")),
        _lists(_histories, batch.column("histories")),
        _shared_jsons(batch.column("tools")),
        _lists(_plain, batch.column("step_rewards")),
        _jsons(batch.column("outcome")),
        _numbers(batch.column("metrics")),
        _optional(_failures, batch.column("failure")),
        texts(batch.column("policy")),
        _jsons(batch.column("sampling")),
        _optional(_plain, batch.column("reward")),
        _optional(_plain, batch.column("advantage")),
    )
    return map(Trajectory, *columns)


def heads(batch: pa.RecordBatch) -> Iterable[dict[str, Any]]:
    """Return the fields of each trajectory by which it is chosen and named. Equal policies are one object."""
    columns: dict[str, Sequence[Any]] = {
        "id": texts(batch.column("id")),
        "scenario": scenarios(batch.column("scenario")),
        "sample": _plain(batch.column("sample")),
        "failure": _optional(_failures, batch.column("failure")),
        "policy": list(map(sys.intern, texts(batch.column("policy")))),
        "reward": _optional(_plain, batch.column("reward")),
    }
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


HEAD_COLUMNS = ("id", "scenario", "sample", "failure", "policy", "sampling", "histories.list.element.agent")
"""Columns of trajectories, besides the joined reward, that `head_trajectories` reads."""


def head_trajectories(batch: pa.RecordBatch) -> Iterator[Trajectory]:
    """Yield the trajectories of a batch of `HEAD_COLUMNS`; their histories have a role only."""
    roles = _lists(lambda array: texts(array.field("agent")), batch.column("histories"))
    for head, sampling, agents in zip(heads(batch), _shared_jsons(batch.column("sampling")), roles, strict=True):
        histories = [History([], agent=sys.intern(agent)) for agent in agents]
        yield Trajectory(histories=histories, sampling=sampling, **head)


def conversation_rows(batch: pa.RecordBatch) -> Iterable[tuple[str, list[History], list[dict[str, Any]]]]:
    """Return id, histories (without tokens) and tools of a batch of `tables.CONVERSATION_COLUMNS`."""
    for start in range(0, len(batch), ROWS_PER_STEP):
        rows = batch.slice(start, ROWS_PER_STEP)
        yield from zip(
            texts(rows.column("id")),
            _lists(_histories, rows.column("histories")),
            _shared_jsons(rows.column("tools")),
            strict=True,
        )


def scored_trajectories(batch: pa.RecordBatch) -> Iterable[Trajectory]:
    """Return the trajectories of a batch that is joined with its scores (`components.trajectories.store`). Components
    become metrics: they do not overwrite a metric, or a value of the outcome, of the same name."""
    judged_steps = _lists(_plain, batch.column("judged_steps"))
    with_components = "components" in batch.schema.names
    parts = _numbers(batch.column("components")) if with_components else [{} for _ in range(len(batch))]
    for trajectory, steps, components in zip(trajectories(batch), judged_steps, parts, strict=True):
        if steps:
            trajectory.step_rewards = steps
        if components:
            new = {name: value for name, value in components.items() if name not in trajectory.outcome}
            trajectory.metrics = {**new, **trajectory.metrics}
        yield trajectory


def scores(batch: pa.RecordBatch) -> Iterable[Score]:
    columns = (
        texts(batch.column("trajectory_id")),
        _optional(_plain, batch.column("reward")),
        _numbers(batch.column("components")),
        _lists(_plain, batch.column("step_rewards")),
        texts(batch.column("explanation")),
        _optional(_plain, batch.column("cost")),
        _optional(_failures, batch.column("failure")),
    )
    return map(Score, *columns)


def selections(batch: pa.RecordBatch) -> Iterable[Selection]:
    columns = (texts(batch.column("trajectory_id")), _plain(batch.column("kept")), texts(batch.column("reason")))
    return map(Selection, *columns)
