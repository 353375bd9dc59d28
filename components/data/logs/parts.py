"""Parts of logged conversations: a call of a model, a half of one, or a score of the conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from components.data.columns import parsed
from components.data.examples import RowProblem
from components.data.logs import payloads


@dataclass(slots=True)
class LogPart:
    """Content of one entry of a log, as a part of a conversation."""

    trace: str
    """Id that the parts of a conversation have in common."""
    start: float | str = 0
    """Time of the call, in the unit of the log: a number, or text that sorts by time."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Prompt of the call in OpenAI's format."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Its alternative answers."""
    tools: list[Any] = field(default_factory=list)
    """Its tools."""
    error: str = ""
    """Error of a call without an answer."""
    problem: str = ""
    """Reason why the entry cannot be used, and with it the whole conversation."""
    scores: dict[str, Any] = field(default_factory=dict)
    """Scores of the conversation by name."""


def called(
    trace: str, start: Any, name: str, request: Any, response: Any, *, tools: Any = None, error: Any = None, hint: str
) -> LogPart:
    """Return the part of a call. name: of the entry, for messages; hint: advice for an entry without content."""
    start = start if isinstance(start, int | float) else str(start)
    try:
        part = LogPart(trace, start, **payloads.call(request, response, tools))
    except RowProblem as problem:
        return LogPart(trace, start, problem=f"{name}: {problem}")
    if not part.messages or not (part.answers or error):
        part.problem = f"{name} has no {'answer' if part.messages else 'messages'}. {hint}"
    elif not part.answers:
        part.error = str(error)[:300]
    return part


def either(values: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first name that has one: exports write `traceId` or `trace_id`."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def structured(values: Mapping[str, Any], name: str) -> Any:
    """Return a list or an object, which a cell of a table holds as JSON; None if it is empty. Raises RowProblem for
    other text."""
    value = parsed(values.get(name)) or None
    if isinstance(value, str):
        text = f"{name}: expected a list or an object, in a table as JSON, got {value[:40]!r}"
        advice = "pandas' to_csv writes Python's text; use DataFrame.to_json(FILE, orient='records', lines=True)"
        raise RowProblem(f"{text}. {advice}", fits=True)
    return value
