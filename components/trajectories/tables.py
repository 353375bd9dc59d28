"""Storage format of trajectories, scores and selections: Arrow schemas, and conversion of rows to them.

Rows are converted to dictionaries, which Arrow stores in columns. `components.trajectories.decode` reads them.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from components.errors import ArtifactDamaged
from components.trajectories.schema import (
    Failure,
    History,
    Message,
    Score,
    Selection,
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
    pa.field("reasoning", _TEXT),
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
CONVERSATION_COLUMNS = ("id", "tools", "histories.list.element.messages", "histories.list.element.agent")
"""Columns of trajectories that hold their conversations as text."""
_COLUMN_SCHEMA = pa.schema(
    [
        _required("id", _TEXT),
        _required("scenario", _struct(_required("id", _TEXT), _required("type", _TEXT), _required("difficulty", _INT))),
        _required("outcome", _TEXT),
        _required("metrics", _NUMBERS),
        pa.field("failure", _struct(_required("boundary", _TEXT))),
        pa.field("reward", _REAL),
    ]
)


# Text and JSON

_UNSTORABLE = re.compile("[\ud800-\udfff\ufdd0]")
_STORED = re.compile("\ufdd0([0-9a-f]{4})")


def stored_text(value: str) -> str:
    """Return text as it is stored, with the characters that UTF-8 cannot encode escaped."""
    return value if value.isascii() else _UNSTORABLE.sub(lambda match: f"\ufdd0{ord(match[0]):04x}", value)


def original_text(value: str) -> str:
    """Return the text that is stored as `value`."""
    return _STORED.sub(lambda match: chr(int(match[1], 16)), value)


def _json(value: Any) -> str:
    return stored_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


# Writing: from a value to Arrow's input


def _if_set(function: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else function(value)


def _number_row(value: dict[str, float]) -> list[tuple[str, float]]:
    return [(stored_text(name), number) for name, number in value.items()]


def _failure_row(failure: Failure) -> dict[str, Any]:
    return {
        "boundary": stored_text(failure.boundary),
        "kind": stored_text(failure.kind),
        "message": stored_text(failure.message),
    }


def _message_row(message: Message) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": stored_text(message.content),
        "tool_calls": [
            {"id": stored_text(call.id), "name": stored_text(call.name), "arguments": stored_text(call.arguments)}
            for call in message.tool_calls
        ],
        "tool_call_id": _if_set(stored_text, message.tool_call_id),
        "span": None if message.span is None else {"start": message.span[0], "end": message.span[1]},
        "finish_reason": _if_set(stored_text, message.finish_reason),
        "trained": None if message.trained else False,
        "reasoning": _if_set(stored_text, message.reasoning),
    }


def _history_row(history: History) -> dict[str, Any]:
    return {
        "messages": [_message_row(message) for message in history.messages],
        "token_ids": history.token_ids,
        "logprobs": history.logprobs,
        "agent": stored_text(history.agent),
    }


def trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as a row. Raises TypeError if a JSON field is not JSON data."""
    scenario = trajectory.scenario
    try:
        return {
            "id": stored_text(trajectory.id),
            "scenario": {
                "id": stored_text(scenario.id),
                "input": _json(scenario.input),
                "split": stored_text(scenario.split),
                "type": stored_text(scenario.type),
                "difficulty": scenario.difficulty,
            },
            "sample": trajectory.sample,
            "histories": [_history_row(history) for history in trajectory.histories],
            "tools": _json(trajectory.tools),
            "step_rewards": trajectory.step_rewards,
            "outcome": _json(trajectory.outcome),
            "metrics": _number_row(trajectory.metrics),
            "failure": _if_set(_failure_row, trajectory.failure),
            "policy": stored_text(trajectory.policy),
            "sampling": _json(trajectory.sampling),
            "reward": trajectory.reward,
            "advantage": trajectory.advantage,
        }
    except TypeError as error:
        raise TypeError(f"trajectory {trajectory.id} cannot be stored: {error}") from error


def score_row(score: Score) -> dict[str, Any]:
    return {
        "trajectory_id": stored_text(score.trajectory_id),
        "reward": score.reward,
        "components": _number_row(score.components),
        "step_rewards": score.step_rewards,
        "explanation": stored_text(score.explanation),
        "cost": score.cost,
        "failure": _if_set(_failure_row, score.failure),
    }


def selection_row(selection: Selection) -> dict[str, Any]:
    return {
        "trajectory_id": stored_text(selection.trajectory_id),
        "kept": selection.kept,
        "reason": stored_text(selection.reason),
    }


def column_batch(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """Return trajectories in memory, with their rewards, in the columns that are read without whole trajectories
    (`components.trajectories.reads`)."""
    rows = [
        {
            "id": stored_text(trajectory.id),
            "scenario": {
                "id": stored_text(trajectory.scenario.id),
                "type": stored_text(trajectory.scenario.type),
                "difficulty": trajectory.scenario.difficulty,
            },
            "outcome": _json(trajectory.outcome),
            "metrics": _number_row(trajectory.metrics),
            "failure": trajectory.failure and {"boundary": stored_text(trajectory.failure.boundary)},
            "reward": trajectory.reward,
        }
        for trajectory in trajectories
    ]
    return pa.RecordBatch.from_pylist(rows, _COLUMN_SCHEMA)


class AlignedRows:
    """Rows of a file that was made from a file of trajectories, taken with the rows of that file."""

    def __init__(self, path: Path, batches: Iterator[pa.RecordBatch], trajectories: Path):
        self.path = path
        self._batches = batches
        self._trajectories = trajectories
        self._rest: pa.RecordBatch | None = None
        """Rows that were read and not yet taken."""

    def take(self, ids: pa.StringArray) -> pa.RecordBatch:
        """Return the rows of the next trajectories. Raises ArtifactDamaged if a row is for another trajectory."""
        rows = self._next(len(ids))
        row_ids = rows.column("trajectory_id")
        known = ids[: len(rows)]
        if not pc.all(pc.equal(row_ids, known)).as_py() and len(rows):
            place = pc.indices_nonzero(pc.not_equal(row_ids, known))[0].as_py()
            raise self._mismatch(f"{_id(row_ids, place)} stands where {_id(ids, place)} should")
        if len(rows) < len(ids):
            raise self._mismatch(f"it ends before {_id(ids, len(rows))}")
        return rows

    def end(self) -> None:
        """Raise ArtifactDamaged if there are further rows."""
        if len(rows := self._next(1)):
            raise self._mismatch(f"{_id(rows.column('trajectory_id'), 0)} comes after the last trajectory")

    def _next(self, count: int) -> pa.RecordBatch:
        """Return the next rows; fewer than `count` at the end of the file."""
        held = [] if self._rest is None else [self._rest]
        available = sum(map(len, held))
        while available < count and (batch := next(self._batches, None)) is not None:
            held.append(batch)
            available += len(batch)
        if not held:
            return pa.RecordBatch.from_pydict({"trajectory_id": pa.array([], pa.string())})
        rows = held[0] if len(held) == 1 else pa.concat_batches(held)
        self._rest = rows.slice(count)
        return rows.slice(0, count)

    def _mismatch(self, detail: str) -> ArtifactDamaged:
        return ArtifactDamaged(f"{self.path} was not made from {self._trajectories}: {detail}")


def _id(ids: pa.StringArray, place: int) -> str:
    return original_text(ids[place].as_py())
