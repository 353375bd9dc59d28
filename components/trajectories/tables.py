"""The stored form of trajectories, scores and selections: an Arrow schema for each, and rows both ways.

Conversations, token ids and log-probs are nested columns; only what has no fixed form (a scenario's input, tools,
outcome, sampling) is JSON text. Names, units and meanings are those of `components.trajectories.schema`. Every row
comes back as it went in, with these forms:

- Log-probs are float32: a Python float that is no float32 value comes back rounded to one. Rewards, metrics and costs
  are float64. NaN is kept, and is not None.
- Token ids, spans, `sample` and `difficulty` are int32.
- JSON fields hold JSON data: a tuple comes back as a list, a key as a string. Key order is kept: it shows in prompts.
- Text may hold lone surrogates: models produce them (`"\\ud83d"` in the arguments of a call), and UTF-8 cannot hold
  them. They are stored as U+FDD0 and four hexadecimal digits, and so is U+FDD0 itself, a noncharacter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

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
        _required("cost", _REAL),
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
    return _UNSTORABLE.sub(lambda match: f"\ufdd0{ord(match[0]):04x}", value)


def _untext(value: str) -> str:
    return _STORED.sub(lambda match: chr(int(match[1], 16)), value)


def _optional(function: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else function(value)


def _json(value: Any) -> str:
    return _text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _unjson(value: str) -> Any:
    return json.loads(_untext(value))


def _numbers(value: dict[str, float]) -> list[tuple[str, float]]:
    return [(_text(name), number) for name, number in value.items()]


def _unnumbers(value: list[tuple[str, float]]) -> dict[str, float]:
    return {_untext(name): number for name, number in value}


# Rows: one function each way for everything that is stored


def _failure_row(failure: Failure) -> dict[str, Any]:
    return {"boundary": _text(failure.boundary), "kind": _text(failure.kind), "message": _text(failure.message)}


def _failure(row: dict[str, Any]) -> Failure:
    return Failure(_untext(row["boundary"]), _untext(row["kind"]), _untext(row["message"]))


def _message_row(message: Message) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": _text(message.content),
        "tool_calls": [
            {"id": _text(call.id), "name": _text(call.name), "arguments": _text(call.arguments)}
            for call in message.tool_calls
        ],
        "tool_call_id": _optional(_text, message.tool_call_id),
        "span": None if message.span is None else {"start": message.span[0], "end": message.span[1]},
        "finish_reason": _optional(_text, message.finish_reason),
    }


def _message(row: dict[str, Any]) -> Message:
    return Message(
        role=row["role"],
        content=_untext(row["content"]),
        tool_calls=[
            ToolCall(_untext(call["id"]), _untext(call["name"]), _untext(call["arguments"]))
            for call in row["tool_calls"]
        ],
        tool_call_id=_optional(_untext, row["tool_call_id"]),
        span=None if row["span"] is None else (row["span"]["start"], row["span"]["end"]),
        finish_reason=_optional(_untext, row["finish_reason"]),
    )


def _history_row(history: History) -> dict[str, Any]:
    return {
        "messages": [_message_row(message) for message in history.messages],
        "token_ids": history.token_ids,
        "logprobs": history.logprobs,
        "agent": _text(history.agent),
    }


def _history(row: dict[str, Any]) -> History:
    messages = [_message(message) for message in row["messages"]]
    return History(messages, row["token_ids"], row["logprobs"], _untext(row["agent"]))


def trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
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
            "metrics": _numbers(trajectory.metrics),
            "failure": _optional(_failure_row, trajectory.failure),
            "policy": _text(trajectory.policy),
            "sampling": _json(trajectory.sampling),
            "reward": trajectory.reward,
            "advantage": trajectory.advantage,
        }
    except TypeError as error:
        raise TypeError(f"trajectory {trajectory.id} cannot be stored: {error}") from error


def trajectory_from_row(row: dict[str, Any]) -> Trajectory:
    scenario = row["scenario"]
    return Trajectory(
        id=_untext(row["id"]),
        scenario=Scenario(
            id=_untext(scenario["id"]),
            input=_unjson(scenario["input"]),
            split=_untext(scenario["split"]),
            type=_untext(scenario["type"]),
            difficulty=scenario["difficulty"],
        ),
        sample=row["sample"],
        histories=[_history(history) for history in row["histories"]],
        tools=_unjson(row["tools"]),
        step_rewards=row["step_rewards"],
        outcome=_unjson(row["outcome"]),
        metrics=_unnumbers(row["metrics"]),
        failure=_optional(_failure, row["failure"]),
        policy=_untext(row["policy"]),
        sampling=_unjson(row["sampling"]),
        reward=row["reward"],
        advantage=row["advantage"],
    )


def score_row(score: Score) -> dict[str, Any]:
    return {
        "trajectory_id": _text(score.trajectory_id),
        "reward": score.reward,
        "components": _numbers(score.components),
        "step_rewards": score.step_rewards,
        "explanation": _text(score.explanation),
        "cost": score.cost,
        "failure": _optional(_failure_row, score.failure),
    }


def score_from_row(row: dict[str, Any]) -> Score:
    return Score(
        trajectory_id=_untext(row["trajectory_id"]),
        reward=row["reward"],
        components=_unnumbers(row["components"]),
        step_rewards=row["step_rewards"],
        explanation=_untext(row["explanation"]),
        cost=row["cost"],
        failure=_optional(_failure, row["failure"]),
    )


def selection_row(selection: Selection) -> dict[str, Any]:
    return {
        "trajectory_id": _text(selection.trajectory_id),
        "kept": selection.kept,
        "reason": _text(selection.reason),
    }


def selection_from_row(row: dict[str, Any]) -> Selection:
    return Selection(_untext(row["trajectory_id"]), row["kept"], _untext(row["reason"]))
