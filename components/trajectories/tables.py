"""Storage format of trajectories, scores and selections: Arrow schemas, and conversion in both directions.

Rows are converted to dictionaries, which Arrow stores in columns. Reading converts each column of a batch as a whole,
which is several times as fast as row by row.

Conversations, token ids and log-probabilities are nested columns; only data without a fixed structure (a scenario's
input, tools, outcome, sampling) is JSON text. Names, units and meanings are those of `components.trajectories.schema`.
Rows round-trip without loss, with these types:

- Log-probabilities are float32: other Python floats are rounded. Rewards, metrics and costs are float64. NaN is
preserved and distinct from None. - Token ids, spans, `sample` and `difficulty` are int32. - JSON fields contain JSON
data: a tuple is read as a list, a key as a string. Key order is preserved, because it affects prompts. - Text may
contain lone surrogates, which models produce (`"\\ud83d"` in the arguments of a call) and UTF-8 cannot encode. They are
stored as U+FDD0 and four hexadecimal digits; so is the noncharacter U+FDD0 itself. - Trajectories of a batch share
equal scenarios and equal tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, TypeVar

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

# Arrow schemas


def _required(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=False)


def _struct(*fields: pa.Field) -> pa.DataType:
    return pa.struct(list(fields))


def _list(item: pa.DataType) -> pa.DataType:
    return pa.list_(_required("element", item))


_TEXT, _INT, _REAL = pa.string(), pa.int32(), pa.float64()
_NUMBERS = pa.map_(_TEXT, _required("value", _REAL))
_FAILURE = _struct(_required("boundary", _TEXT), _required("kind", _TEXT), _required("message", _TEXT))

_SCENARIO = _struct(
    _required("id", _TEXT),
    _required("input", _TEXT),  # JSON
    _required("split", _TEXT),
    _required("type", _TEXT),
    _required("difficulty", _INT),
)
_TOOL_CALL = _struct(_required("id", _TEXT), _required("name", _TEXT), _required("arguments", _TEXT))
_MESSAGE = _struct(
    _required("role", _TEXT),
    _required("content", _TEXT),
    _required("tool_calls", _list(_TOOL_CALL)),
    pa.field("tool_call_id", _TEXT),
    pa.field("span", _struct(_required("start", _INT), _required("end", _INT))),
    pa.field("finish_reason", _TEXT),
    pa.field("trained", pa.bool_()),  # null: true, as in files of before this column
)
_HISTORY = _struct(
    _required("messages", _list(_MESSAGE)),
    _required("token_ids", _list(_INT)),
    _required("logprobs", _list(pa.float32())),
    _required("agent", _TEXT),
)

TRAJECTORY_SCHEMA = pa.schema(
    [
        _required("id", _TEXT),
        _required("scenario", _SCENARIO),
        _required("sample", _INT),
        _required("histories", _list(_HISTORY)),
        _required("tools", _TEXT),  # JSON
        _required("step_rewards", _list(_REAL)),
        _required("outcome", _TEXT),  # JSON
        _required("metrics", _NUMBERS),
        pa.field("failure", _FAILURE),
        _required("policy", _TEXT),
        _required("sampling", _TEXT),  # JSON
        pa.field("reward", _REAL),
        pa.field("advantage", _REAL),
    ]
)
SCORE_SCHEMA = pa.schema(
    [
        _required("trajectory_id", _TEXT),
        pa.field("reward", _REAL),
        _required("components", _NUMBERS),
        _required("step_rewards", _list(_REAL)),
        _required("explanation", _TEXT),
        pa.field("cost", _REAL),
        pa.field("failure", _FAILURE),
    ]
)
SELECTION_SCHEMA = pa.schema(
    [_required("trajectory_id", _TEXT), _required("kept", pa.bool_()), _required("reason", _TEXT)]
)


# Text and JSON

_UNSTORABLE = re.compile("[\ud800-\udfff\ufdd0]")
_STORED = re.compile("\ufdd0([0-9a-f]{4})")


def _text(value: str) -> str:
    return value if value.isascii() else _UNSTORABLE.sub(lambda match: f"\ufdd0{ord(match[0]):04x}", value)


def _untext(value: str) -> str:
    return _STORED.sub(lambda match: chr(int(match[1], 16)), value)


def _json(value: Any) -> str:
    return _text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


# Writing: from a value to Arrow's input


def _if_set(function: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else function(value)


def _number_row(value: dict[str, float]) -> list[tuple[str, float]]:
    return [(_text(name), number) for name, number in value.items()]


def _failure_row(failure: Failure) -> dict[str, Any]:
    return {"boundary": _text(failure.boundary), "kind": _text(failure.kind), "message": _text(failure.message)}


def _message_row(message: Message) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": _text(message.content),
        "tool_calls": [
            {"id": _text(call.id), "name": _text(call.name), "arguments": _text(call.arguments)}
            for call in message.tool_calls
        ],
        "tool_call_id": _if_set(_text, message.tool_call_id),
        "span": None if message.span is None else {"start": message.span[0], "end": message.span[1]},
        "finish_reason": _if_set(_text, message.finish_reason),
        "trained": None if message.trained else False,
    }


def _history_row(history: History) -> dict[str, Any]:
    return {
        "messages": [_message_row(message) for message in history.messages],
        "token_ids": history.token_ids,
        "logprobs": history.logprobs,
        "agent": _text(history.agent),
    }


def trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as a row. Raises TypeError if a JSON field is not JSON data."""
    scenario = trajectory.scenario
    try:
        return {
            "id": _text(trajectory.id),
            "scenario": {
                "id": _text(scenario.id),
                "input": _json(scenario.input),
                "split": _text(scenario.split),
                "type": _text(scenario.type),
                "difficulty": scenario.difficulty,
            },
            "sample": trajectory.sample,
            "histories": [_history_row(history) for history in trajectory.histories],
            "tools": _json(trajectory.tools),
            "step_rewards": trajectory.step_rewards,
            "outcome": _json(trajectory.outcome),
            "metrics": _number_row(trajectory.metrics),
            "failure": _if_set(_failure_row, trajectory.failure),
            "policy": _text(trajectory.policy),
            "sampling": _json(trajectory.sampling),
            "reward": trajectory.reward,
            "advantage": trajectory.advantage,
        }
    except TypeError as error:
        raise TypeError(f"trajectory {trajectory.id} cannot be stored: {error}") from error


def score_row(score: Score) -> dict[str, Any]:
    return {
        "trajectory_id": _text(score.trajectory_id),
        "reward": score.reward,
        "components": _number_row(score.components),
        "step_rewards": score.step_rewards,
        "explanation": _text(score.explanation),
        "cost": score.cost,
        "failure": _if_set(_failure_row, score.failure),
    }


def selection_row(selection: Selection) -> dict[str, Any]:
    return {
        "trajectory_id": _text(selection.trajectory_id),
        "kept": selection.kept,
        "reason": _text(selection.reason),
    }


# Reading: from an Arrow array to a list with one value for each of its rows

Value = TypeVar("Value")


def _plain(array: pa.Array) -> list[Any]:
    """Return numbers, booleans, or text without escaped characters, as Python values."""
    return array.to_numpy(zero_copy_only=False).tolist()


def _texts(array: pa.Array) -> list[str]:
    return [value if value.isascii() else _untext(value) for value in _plain(array)]


def _jsons(array: pa.Array) -> list[Any]:
    return [_parsed(value) for value in _texts(array)]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ArtifactDamaged(
            "a table of episodes holds a value that is nested too deeply; Espalier did not write it"
        ) from None


def _shared_jsons(array: pa.Array) -> list[Any]:
    """Return parsed JSON values; equal values are one object."""
    texts = _texts(array)
    values = {text: _parsed(text) for text in set(texts)}
    return [values[text] for text in texts]


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
    return list(zip(_texts(array.field(0)), _plain(array.field(1)), strict=True))


def _numbers(array: pa.Array) -> list[dict[str, float]]:
    return [dict(pairs) for pairs in _lists(_pairs, array)]


def _failures(array: pa.Array) -> list[Failure]:
    return list(map(Failure, *(_texts(array.field(name)) for name in ("boundary", "kind", "message"))))


def failures(batch: pa.RecordBatch) -> list[tuple[str, Failure]]:
    """Return id and failure of each failed trajectory."""
    failed = batch.filter(batch.column("failure").is_valid())
    return list(zip(_texts(failed.column("id")), _failures(failed.column("failure")), strict=True))


def _scenarios(array: pa.Array) -> list[Scenario]:
    """Return scenarios; equal scenarios are one object."""
    texts = [_texts(array.field(name)) for name in ("id", "input", "split", "type")]
    rows = list(zip(*texts, _plain(array.field("difficulty")), strict=True))
    unique = {row: Scenario(row[0], _parsed(row[1]), *row[2:]) for row in set(rows)}
    return [unique[row] for row in rows]


def _tool_calls(array: pa.Array) -> list[ToolCall]:
    return list(map(ToolCall, *(_texts(array.field(name)) for name in ("id", "name", "arguments"))))


def _spans(array: pa.Array) -> list[tuple[int, int]]:
    return list(zip(_plain(array.field("start")), _plain(array.field("end")), strict=True))


def _messages(array: pa.Array) -> list[Message]:
    columns = (
        _plain(array.field("role")),
        _texts(array.field("content")),
        _lists(_tool_calls, array.field("tool_calls")),
        _optional(_texts, array.field("tool_call_id")),
        _optional(_spans, array.field("span")),
        _optional(_texts, array.field("finish_reason")),
        _trained(array),
    )
    return list(map(Message, *columns))


def _trained(array: pa.Array) -> list[bool]:
    if array.type.get_field_index("trained") < 0 or array.field("trained").null_count == len(array):
        return [True] * len(array)
    return [value is not False for value in array.field("trained").to_pylist()]


def _histories(array: pa.Array) -> list[History]:
    columns = (
        _lists(_messages, array.field("messages")),
        _lists(_plain, array.field("token_ids")),
        _lists(_plain, array.field("logprobs")),
        _texts(array.field("agent")),
    )
    return list(map(History, *columns))


def trajectories(batch: pa.RecordBatch) -> Iterable[Trajectory]:
    columns = (
        _texts(batch.column("id")),
        _scenarios(batch.column("scenario")),
        _plain(batch.column("sample")),
        _lists(_histories, batch.column("histories")),
        _shared_jsons(batch.column("tools")),
        _lists(_plain, batch.column("step_rewards")),
        _jsons(batch.column("outcome")),
        _numbers(batch.column("metrics")),
        _optional(_failures, batch.column("failure")),
        _texts(batch.column("policy")),
        _jsons(batch.column("sampling")),
        _optional(_plain, batch.column("reward")),
        _optional(_plain, batch.column("advantage")),
    )
    return map(Trajectory, *columns)


def scores(batch: pa.RecordBatch) -> Iterable[Score]:
    columns = (
        _texts(batch.column("trajectory_id")),
        _optional(_plain, batch.column("reward")),
        _numbers(batch.column("components")),
        _lists(_plain, batch.column("step_rewards")),
        _texts(batch.column("explanation")),
        _optional(_plain, batch.column("cost")),
        _optional(_failures, batch.column("failure")),
    )
    return map(Score, *columns)


def rewards(batch: pa.RecordBatch) -> Iterable[tuple[str, float | None, list[float], dict[str, float]]]:
    """Return trajectory id, reward, step rewards and components of scores; empty components if they were not read."""
    with_components = "components" in batch.schema.names
    return zip(
        _texts(batch.column("trajectory_id")),
        _optional(_plain, batch.column("reward")),
        _lists(_plain, batch.column("step_rewards")),
        _numbers(batch.column("components")) if with_components else ({} for _ in range(len(batch))),
        strict=True,
    )


def selections(batch: pa.RecordBatch) -> Iterable[Selection]:
    columns = (_texts(batch.column("trajectory_id")), _plain(batch.column("kept")), _texts(batch.column("reason")))
    return map(Selection, *columns)
