"""Answers of episodes, and expected answers.

The answer is read from the last message of the first agent, in that agent's last history:

    text                  the whole message, stripped
    messages              all messages of the episode's agents, each on lines of its own
    tag:NAME              the content of the last <NAME>…</NAME>
    boxed                 the content of the last \\boxed{…}
    line                  the last non-empty line, without a leading "Answer:" or "####"
    call:TOOL.ARGUMENT    that argument of the last call of a tool, in any message
    outcome.FIELD         the answer that the environment reports

An episode without such an answer is wrong, not unscored. The expected answer is a field of the scenario's input, the
outcome or the metrics: `input.answer`, `outcome.answer`, `metrics.turns`; a bare name is looked up in input, then in
outcome. An episode without the field is unscored.
"""

from __future__ import annotations

import json
import re
from typing import Any

from components.answer_text import boxed, last_line
from components.errors import JudgeError, Problem, SpecError
from components.trajectories.parts import SOLVER
from components.trajectories.reasoning import with_reasoning
from components.trajectories.schema import History, Message, Trajectory

WHERE = "text, messages, tag:NAME, boxed, line, call:TOOL.ARGUMENT or outcome.FIELD"
_PLACES = re.compile(r"(input|outcome|metrics)\.(.+)|scenario\.(id|type|difficulty|split)|success", re.DOTALL)


class AnswerReader:
    """Place of the answer in an episode. Raises SpecError for an unknown place."""

    def __init__(self, where: str, key: str = "reward.answer"):
        kind, _, detail = where.partition(":")
        tool, _, argument = detail.partition(".")
        valid = where in ("text", "messages", "boxed", "line") or (kind == "tag" and re.fullmatch(r"[\w-]+", detail))
        if not valid and not (kind == "call" and tool and argument) and not re.fullmatch(r"outcome\..+", where):
            raise SpecError([Problem(key, f"{where!r} is no place of an answer; expected {WHERE}")])
        self.where, self._kind, self._detail = where, kind, detail

    def of(self, trajectory: Trajectory) -> str | None:
        """Return the answer; None if the episode gave none."""
        if self.where.startswith("outcome."):
            value = trajectory.outcome.get(self.where.removeprefix("outcome."))
            return None if value is None else as_text(value)
        if self._kind == "call":
            return _argument(trajectory, *self._detail.split(".", 1))
        if self.where == "messages":
            return "\n".join(message.content for message in agent_messages(trajectory)) or None
        text = last_text(trajectory)
        if self._kind == "tag":
            return tagged(text, self._detail)
        if self.where == "boxed":
            return boxed(text)
        if self.where == "line":
            text = last_line(text)
        return text.strip() or None


def main_history(trajectory: Trajectory) -> History:
    """Return the last history of the first agent: after context compaction, the one that ended the episode."""
    if not trajectory.histories:
        raise JudgeError("the episode has no messages")
    agent = trajectory.histories[0].agent
    return [history for history in trajectory.histories if history.agent == agent][-1]


def last_message(trajectory: Trajectory) -> Message:
    """Return the last assistant message; an empty one if there is none."""
    messages = main_history(trajectory).messages
    return next((message for message in reversed(messages) if message.role == "assistant"), Message("assistant", ""))


def last_text(trajectory: Trajectory) -> str:
    """Return the text of the last assistant message, without its reasoning; empty if there is none."""
    return last_message(trajectory).content


def text_with_reasoning(message: Message) -> str:
    """Return the text of a message after its reasoning (`with_reasoning`)."""
    return with_reasoning(message, message.content)


def sampled_messages(trajectory: Trajectory) -> list[tuple[History, int]]:
    """Return the sampled messages of the episode's agents as (history, index), each once, in order. Without token data,
    return all assistant messages, except those that a later history of the same agent repeats at its beginning."""
    places = [(history, at) for history in trajectory.histories for at in range(len(history.messages))]
    sampled = [(history, at) for history, at in places if history.messages[at].span is not None]
    if sampled:
        return sampled
    messages: list[tuple[History, int]] = []
    before: dict[str, list[Message]] = {}
    for history in trajectory.histories:
        shared = 0
        for previous, current in zip(before.get(history.agent, []), history.messages, strict=False):
            if (previous.role, previous.content, previous.tool_calls) != (
                current.role,
                current.content,
                current.tool_calls,
            ):
                break
            shared += 1
        new = range(shared, len(history.messages))
        messages += [(history, at) for at in new if history.messages[at].role == "assistant"]
        before[history.agent] = history.messages
    return messages


def agent_messages(trajectory: Trajectory) -> list[Message]:
    """Return the messages of the episode's agents (`sampled_messages`)."""
    return [history.messages[at] for history, at in sampled_messages(trajectory)]


def tagged(text: str, name: str) -> str | None:
    """Return the content of the last <name>…</name>; None if there is none."""
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, end) if end >= 0 else -1
    return text[start + len(name) + 2 : end].strip() if start >= 0 else None


def check_field(path: str, key: str) -> None:
    """Raise SpecError if `path` is not a field of an episode."""
    if "." in path and not _PLACES.fullmatch(path):
        places = "input.FIELD, outcome.FIELD, metrics.NAME, scenario.id, scenario.type, success, or a field's name"
        raise SpecError([Problem(key, f"{path!r} is no field of an episode; expected {places}")])


def of_input(path: str, outcome: bool) -> str | None:
    """Return the field of a scenario's input that a path reads; None if it reads, or may read, something else.

    outcome: True if a bare name may also be a field of the outcome, whose fields are unknown before an episode.
    """
    place, _, name = path.partition(".")
    if name:
        return name if place == "input" else None
    return None if outcome or path == "success" else path


def field(trajectory: Trajectory, path: str) -> Any:
    """Return the value of a field. Raises JudgeError if the episode has no field of this name."""
    scenario = trajectory.scenario
    if path == "success":
        return trajectory.success
    places = {"input": scenario.input, "outcome": trajectory.outcome, "metrics": trajectory.metrics}
    place, _, name = path.partition(".")
    if place == "scenario" and name:
        return getattr(scenario, name)
    candidates = [places[place]] if name and place in places else [scenario.input, trajectory.outcome]
    for values in candidates:
        if (name or path) in values:
            return values[name or path]
    available = ", ".join(sorted({key for values in candidates for key in values})) or "nothing"
    raise JudgeError(
        f"there is no {path!r} in the episode's {place if name else 'input or outcome'}; it has {available}"
    )


def count(trajectory: Trajectory, name: str) -> float:
    """Return a metric of the episode. Raises JudgeError if it has none of this name."""
    return float(field(trajectory, f"metrics.{name}"))


def sampled_tokens(trajectory: Trajectory) -> float:
    """Return the number of sampled tokens; 0 for a demonstration, which was not sampled. Raises JudgeError if the
    engine did not report tokens."""
    if trajectory.policy == SOLVER:
        return 0.0
    tokens = count(trajectory, "sampled_tokens")
    if not tokens and any(message.content or message.tool_calls for message in agent_messages(trajectory)):
        raise JudgeError("the engine does not say the tokens that it samples; with inference=remote: tokens=true")
    return tokens


def as_text(value: Any) -> str:
    """Return a value as answer text: text unchanged, other data as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _argument(trajectory: Trajectory, tool: str, argument: str) -> str | None:
    calls = [call for message in agent_messages(trajectory) for call in message.tool_calls if call.name == tool]
    if not calls:
        return None
    try:
        arguments = json.loads(calls[-1].arguments)
    except (ValueError, RecursionError):
        return None
    value = arguments.get(argument) if isinstance(arguments, dict) else None
    return None if value is None else as_text(value).strip()
