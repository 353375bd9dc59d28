"""What an episode finally said, and what it was expected to say.

The answer is read from the last message of the agent that began, in the last history of its own:

    text                  all of it, without blanks around it
    tag:NAME              what stands in the last <NAME>…</NAME>
    boxed                 what stands in the last \\boxed{…}
    line                  the last line that is not empty, without a leading "Answer:" or "####"
    call:TOOL.ARGUMENT    that argument of the last call of a tool, in whichever message
    outcome.FIELD         what the environment says was answered

An episode that gave no such answer is wrong, not unscored. What was expected is a field of the scenario's input, the
outcome or the metrics: `input.answer`, `outcome.answer`, `metrics.turns`; a name alone is looked for in input, then
outcome. Where an episode has no such field, nothing can be said of it: that is unscored.
"""

from __future__ import annotations

import json
import re
from typing import Any

from components.errors import JudgeError, Problem, SpecError
from components.trajectories.parts import SOLVER
from components.trajectories.schema import History, Message, Trajectory

WHERE = "text, tag:NAME, boxed, line, call:TOOL.ARGUMENT or outcome.FIELD"
_PLACES = re.compile(r"(input|outcome|metrics)\.(.+)|scenario\.(id|type|difficulty|split)|success", re.DOTALL)
_LEAD = re.compile(r"^\W*(?:####|(?:the )?(?:final )?answer(?: is)?\s*[:=]?)\s*", re.IGNORECASE)


class Answer:
    """Where the answer stands. Raises SpecError for a place that there is not."""

    def __init__(self, where: str, key: str = "reward.answer"):
        kind, _, what = where.partition(":")
        tool, _, argument = what.partition(".")
        known = where in ("text", "boxed", "line") or (kind == "tag" and re.fullmatch(r"[\w-]+", what))
        if not known and not (kind == "call" and tool and argument) and not re.fullmatch(r"outcome\..+", where):
            raise SpecError([Problem(key, f"{where!r} is no place of an answer; expected {WHERE}")])
        self.where, self._kind, self._what = where, kind, what

    def of(self, trajectory: Trajectory) -> str | None:
        """The answer; None where the episode gave none."""
        if self.where.startswith("outcome."):
            value = trajectory.outcome.get(self.where.removeprefix("outcome."))
            return None if value is None else as_text(value)
        if self._kind == "call":
            return _argument(trajectory, *self._what.split(".", 1))
        text = last_text(trajectory)
        if self._kind == "tag":
            return tagged(text, self._what)
        if self.where == "boxed":
            return boxed(text)
        if self.where == "line":
            lines = [line for line in text.splitlines() if line.strip()]
            text = _LEAD.sub("", lines[-1]).strip(" *_") if lines else ""
        return text.strip() or None


def main_history(trajectory: Trajectory) -> History:
    """The last history of the agent that began: after a compacted context, the one that ended the episode."""
    if not trajectory.histories:
        raise JudgeError("the episode has no messages")
    agent = trajectory.histories[0].agent
    return [history for history in trajectory.histories if history.agent == agent][-1]


def last_text(trajectory: Trajectory) -> str:
    """Text of the last assistant message; empty where there is none."""
    messages = main_history(trajectory).messages
    return next((message.content for message in reversed(messages) if message.role == "assistant"), "")


def spoken(trajectory: Trajectory) -> list[tuple[History, int]]:
    """Where the messages of the episode's agents are, each once, in order: those that were sampled. Where nobody noted
    tokens, all assistant messages, without those that a later history of the same agent repeats at its beginning."""
    places = [(history, at) for history in trajectory.histories for at in range(len(history.messages))]
    sampled = [(history, at) for history, at in places if history.messages[at].span is not None]
    if sampled:
        return sampled
    found: list[tuple[History, int]] = []
    before: dict[str, list[Message]] = {}
    for history in trajectory.histories:
        same = 0
        for one, other in zip(before.get(history.agent, []), history.messages, strict=False):
            if (one.role, one.content, one.tool_calls) != (other.role, other.content, other.tool_calls):
                break
            same += 1
        rest = range(same, len(history.messages))
        found += [(history, at) for at in rest if history.messages[at].role == "assistant"]
        before[history.agent] = history.messages
    return found


def said(trajectory: Trajectory) -> list[Message]:
    """The messages of the episode's agents (`spoken`)."""
    return [history.messages[at] for history, at in spoken(trajectory)]


def tagged(text: str, name: str) -> str | None:
    """What stands in the last <name>…</name>."""
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, end) if end >= 0 else -1
    return text[start + len(name) + 2 : end].strip() if start >= 0 else None


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{…}, with its braces in pairs."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start + len("\\boxed{") : at].strip()
    return None


def check_field(path: str, key: str) -> None:
    """Raises SpecError where `path` names no place."""
    if "." in path and not _PLACES.fullmatch(path):
        places = "input.FIELD, outcome.FIELD, metrics.NAME, scenario.id, scenario.type, success, or a field's name"
        raise SpecError([Problem(key, f"{path!r} is no field of an episode; expected {places}")])


def of_input(path: str, outcome: bool) -> str | None:
    """Return the field of a scenario's input that a path reads; None where it reads, or may read, something else.

    outcome: a name alone may be a field of the outcome, too, of which nothing is known before an episode.
    """
    place, _, name = path.partition(".")
    if name:
        return name if place == "input" else None
    return None if outcome or path == "success" else path


def field(trajectory: Trajectory, path: str) -> Any:
    """The value of a field. Raises JudgeError where the episode has none of this name."""
    scenario = trajectory.scenario
    if path == "success":
        return trajectory.success
    places = {"input": scenario.input, "outcome": trajectory.outcome, "metrics": trajectory.metrics}
    place, _, name = path.partition(".")
    if place == "scenario" and name:
        return getattr(scenario, name)
    among = [places[place]] if name and place in places else [scenario.input, trajectory.outcome]
    for values in among:
        if (name or path) in values:
            return values[name or path]
    has = ", ".join(sorted({key for values in among for key in values})) or "nothing"
    raise JudgeError(f"there is no {path!r} in the episode's {place if name else 'input or outcome'}; it has {has}")


def count(trajectory: Trajectory, name: str) -> float:
    """A metric of the episode. Raises JudgeError where it has none of this name."""
    return float(field(trajectory, f"metrics.{name}"))


def sampled_tokens(trajectory: Trajectory) -> float:
    """Tokens that the policy sampled; 0 of a demonstration, which was written and not sampled. Raises JudgeError where
    nobody counted them."""
    if trajectory.policy == SOLVER:
        return 0.0
    tokens = count(trajectory, "sampled_tokens")
    if not tokens and any(message.content or message.tool_calls for message in said(trajectory)):
        raise JudgeError("the engine does not say the tokens that it samples; with inference=remote: tokens=true")
    return tokens


def as_text(value: Any) -> str:
    """As an answer would say it: text as it is, other data as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _argument(trajectory: Trajectory, tool: str, argument: str) -> str | None:
    calls = [call for message in said(trajectory) for call in message.tool_calls if call.name == tool]
    if not calls:
        return None
    try:
        given = json.loads(calls[-1].arguments)
    except (ValueError, RecursionError):
        return None
    value = given.get(argument) if isinstance(given, dict) else None
    return None if value is None else as_text(value).strip()
