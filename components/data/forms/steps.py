"""Form `steps`: an instruction and the steps of an episode, each with thought, action, input and observation.

A step is an assistant message in the format of `agent.format=react`, and the observation that follows it. An action
input that is a JSON object stands behind the action, other text in a line `Action Input:` of its own. The action
`Answer` is text to the user. In a row with `tools`, an action is a call of a tool, and its observation the result.

The rewards of the steps add up to the final reward; if all are 0 or null, there are none. `quality` labels each step
for the head `labelled` of a process reward model, and `relevance`, `correctness` and `progress`, beside it or within
it, for the heads of these names. Without `quality`, `labelled` is the mean of the others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from components.data.columns import RowColumns, as_number, parsed
from components.data.examples import STEP_LABELS, DataExample, RowProblem
from components.data.forms.base import Form, Records, conversation, prompt_messages, world
from components.data.forms.writing import labels, plain_or_messages, prompt_length, single
from components.data.messages import without_nulls
from components.trajectories.schema import Message, ToolCall, Trajectory

DIMENSIONS = ("relevance", "correctness", "progress")
"""Labels of a step beside `quality`."""
ANSWER = "Answer"
"""Action that is text to the user."""
_OBSERVATION = "Observation: "
_TOLERANCE = 1e-6
_HEAD = re.compile(r"[\w-]+")
_ACTION = re.compile(r"^(Action|Answer):[ \t]*", re.MULTILINE)
_OBJECT = re.compile(r"(\S+) (\{.*\})", re.DOTALL)


def _read_steps(columns: RowColumns) -> DataExample:
    steps = columns.items("steps")
    for number, step in enumerate(steps):
        if not isinstance(step, Mapping) or not {"thought", "action"} & step.keys():
            raise RowProblem(f"step {number}: expected an object with thought, action, action_input and observation")
    messages, native = prompt_messages(columns.need("instruction")), bool(columns.get("tools"))
    for number, step in enumerate(steps):
        messages += _messages(number, step, native=native)
    labelled, rewards = _labels(steps), _rewards(steps)
    final = columns.number("reward")
    if final is None and columns.get("reward") is not None:
        raise RowProblem("final_reward: expected a number")
    total = sum(rewards or labelled.get(STEP_LABELS, [1.0]))
    if final is not None and rewards and not math.isclose(total, final, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
        raise RowProblem(f"the rewards of the steps add up to {total:g}, but final_reward is {final:g}")
    candidate = conversation(messages, total if final is None else final)
    candidate.step_rewards, candidate.step_labels = rewards or labelled.get(STEP_LABELS, []), labelled
    metadata = parsed(columns.get("metadata"))
    environment = metadata.get("env") if isinstance(metadata, Mapping) else None
    type_ = columns.label("type") or (environment if isinstance(environment, str) else world(columns.label("id")))
    example = DataExample([candidate], type=type_)
    if metadata is not None:
        example.input["metadata"] = metadata
    return example


def _messages(number: int, step: Mapping[str, Any], *, native: bool) -> list[Message]:
    """Return the message of a step and its observation."""
    thought, action, observation = (_text(step.get(name)) for name in ("thought", "action", "observation"))
    arguments = parsed(step.get("action_input"))
    written = (
        json.dumps(without_nulls(arguments), ensure_ascii=False) if isinstance(arguments, Mapping) else _text(arguments)
    )
    calls: list[ToolCall] = []
    if action == ANSWER:
        lines = [*_line("Thought: ", thought), written if native else f"{ANSWER}: {written}"]
    elif native and action:
        if not isinstance(arguments or {}, Mapping):
            raise RowProblem(f"step {number}: action_input of the tool {action}: expected a JSON object")
        calls, lines = [ToolCall(f"call_{number}", action, written or "{}")], _line("", thought)
    elif isinstance(arguments, Mapping):
        lines = [*_line("Thought: ", thought), f"Action: {action} {written}"]
    else:
        lines = [*_line("Thought: ", thought), *_line("Action: ", action), *_line("Action Input: ", written)]
    reasoning, trained = step.get("reasoning_content"), step.get("loss") is not False
    reasoning = reasoning if isinstance(reasoning, str) and reasoning else None
    message = Message("assistant", "\n".join(lines), calls, trained=trained, reasoning=reasoning)
    if not observation:
        return [message]
    if calls:
        return [message, Message("tool", observation, tool_call_id=calls[0].id)]
    return [message, Message("user", observation if action == ANSWER else _OBSERVATION + observation)]


def _line(mark: str, text: str) -> list[str]:
    return [mark + text] if text else []


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def _rewards(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the reward of each step; none if all are 0 or null."""
    rewards = [_number(number, "reward", step.get("reward") or 0.0) for number, step in enumerate(steps)]
    return rewards if any(rewards) else []


def _labels(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the labels of the steps by name. Raises RowProblem unless all steps have the same."""
    rows = []
    for number, step in enumerate(steps):
        quality = step.get("quality")
        scores = {**(quality if isinstance(quality, Mapping) else {STEP_LABELS: quality})}
        scores |= {name: step[name] for name in DIMENSIONS if step.get(name) is not None}
        row = {name: _number(number, name, value) for name, value in scores.items() if value is not None}
        rows.append({STEP_LABELS: fmean(row.values()), **row} if row else row)
        if rows[number].keys() != rows[0].keys():
            raise RowProblem(f"step {number}: expected the labels of step 0 ({', '.join(rows[0]) or 'none'})")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _number(number: int, name: str, value: Any) -> float:
    result = as_number(value)
    if result is None or not _HEAD.fullmatch(name):
        raise RowProblem(f"step {number}: {name:.40} is {value!r:.40}; expected a number")
    return result


def _expresses(trajectory: Trajectory, messages: Sequence[Message]) -> bool:
    """Return True for an episode that calls one tool at a time."""
    steps = messages[prompt_length(messages) :]
    return bool(steps) and all(len(message.tool_calls) <= 1 for message in steps)


def _write_steps(group: Sequence[Trajectory]) -> Records:
    """Yield a row of each episode that calls one tool at a time. Step rewards that do not add up to the reward are
    labels, unless all are 0."""
    for trajectory, messages in single(group):
        if not _expresses(trajectory, messages):
            continue
        cut = prompt_length(messages)
        steps: list[dict[str, Any]] = []
        for message in messages[cut:]:
            if message.role == "assistant":
                own: dict[str, Any] = {"reasoning_content": message.reasoning} if message.reasoning is not None else {}
                own |= {} if message.trained else {"loss": False}
                steps.append({**_parts(message), "observation": "", **own})
            else:
                earlier, text = steps[-1]["observation"], message.content.removeprefix(_OBSERVATION)
                steps[-1]["observation"] = f"{earlier}\n{text}" if earlier else text
        rewards: Sequence[float | None] = trajectory.step_rewards
        name = "reward"
        if len(rewards) != len(steps):
            rewards = [None] * len(steps)
        elif any(rewards) and not math.isclose(
            sum(trajectory.step_rewards), trajectory.reward or 0.0, abs_tol=_TOLERANCE
        ):
            name = "quality"
        described = labels(trajectory)
        metadata = trajectory.scenario.input.get("metadata")
        yield {
            "task_id": described.pop("id"),
            "task_type": described.pop("type", ""),
            **described,
            "instruction": plain_or_messages(messages[:cut], "user"),
            "steps": [{**step, name: reward} for step, reward in zip(steps, rewards, strict=True)],
            "final_reward": trajectory.reward,
            "metadata": {**(metadata if isinstance(metadata, Mapping) else {}), "num_steps": len(steps)},
        }


def _parts(message: Message) -> dict[str, Any]:
    """Return thought, action and action input of an assistant message."""
    if message.tool_calls:
        call = message.tool_calls[0]
        return {"thought": message.content, "action": call.name, "action_input": json.loads(call.arguments)}
    markers = list(_ACTION.finditer(message.content))
    before = message.content[: markers[-1].start()] if markers else message.content
    thought = before.removeprefix("Thought:").strip()
    if not markers and not before.startswith("Thought:"):
        return {"thought": "", "action": ANSWER, "action_input": message.content}
    text = message.content[markers[-1].end() :] if markers else ""
    if markers and markers[-1][1] == ANSWER:
        return {"thought": thought, "action": ANSWER, "action_input": text}
    if (call_text := _OBJECT.fullmatch(text)) and isinstance(parsed(call_text[2]), dict):
        return {"thought": thought, "action": call_text[1], "action_input": parsed(call_text[2])}
    action, _, written = text.partition("\nAction Input: ")
    return {"thought": thought, "action": action, "action_input": written}


STEPS = Form(
    "steps",
    "an instruction and steps of thought, action, action_input, observation, with rewards or labels of their quality",
    {"instruction": ("instruction", "task", "prompt", "question"), "steps": ("steps", "trajectory")},
    _read_steps,
    _write_steps,
    {"metadata": ("metadata",)},
    expresses=_expresses,
)
