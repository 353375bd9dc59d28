"""Columns of a dataset as the input of a scenario.

The input holds `prompt` (a text or messages), `answer` and `demonstration` if their columns are set, and the other
columns under their own names, for rewards to read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.answer_text import last_number
from components.errors import SpecError
from components.specs.base import nearest

PROMPT_ROLES = ("system", "user", "assistant")
_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")
MOST_DIFFICULTY = 2**31 - 1


class RowError(ValueError):
    """Row that does not fit the columns of the configuration. key: the key of the environment that names the column."""

    def __init__(self, key: str, message: str, near: str | None = None):
        super().__init__(message)
        self.key, self.nearest = key, near


@dataclass(frozen=True)
class RowTask:
    """Parts of a scenario, from one row."""

    input: dict[str, Any]
    type: str
    difficulty: int


@dataclass(frozen=True)
class DatasetColumns:
    """Columns that a scenario is made of; hashable. Its fields are arguments of the environment."""

    prompt: str | None
    """Column with a text or messages; None: `template`."""
    template: str | None
    """Text with `{column}` in it; None: `prompt`."""
    answer: str | None
    """Column with the right answer, or a list of right answers; None for none."""
    answer_after: str | None
    """Text before the answer in its column; None: the whole column is the answer."""
    demonstration: str | None
    """Column with a text, or with messages of which those of the assistant count; None for none."""
    type: str | None
    """Column with the scenario type; None for none."""
    difficulty: str | None
    """Column with the difficulty; None for none."""
    fields: tuple[str, ...] | None
    """Other columns of the input; None takes all."""
    numeric: bool
    """True if answers must contain a number."""

    def check(self) -> None:
        """Raise SpecError if the columns contradict each other."""
        if (self.prompt is None) == (self.template is None):
            raise invalid("prompt", "set prompt (a column) or template (a text with {column}), exactly one of the two")
        if self.answer_after is not None and self.answer is None:
            raise invalid("answer_after", "is set without answer; set environment.answer to the column that holds it")
        for hidden in ("answer", "demonstration"):
            column = getattr(self, hidden)
            if column is not None and column in (*self.placeholders(), self.prompt):
                key = "template" if self.template is not None else "prompt"
                raise invalid(key, f"shows the column {column!r}, which environment.{hidden} hides from the agent")

    def placeholders(self) -> list[str]:
        """Return the columns that the template names."""
        return [match[1] for match in _FIELD.finditer(self.template or "") if match[1]]

    def task(self, row: Mapping[str, Any]) -> RowTask:
        """Return the task of a row. Raises RowError."""
        mapped = {self.prompt, self.answer, self.demonstration}
        names = [name for name in row if name not in mapped] if self.fields is None else self.fields
        task = {name: _value(row, name, "fields") for name in names}
        task["prompt"] = self._prompt(row)
        if self.answer is not None:
            task["answer"] = self._answer(_value(row, self.answer, "answer"))
        if self.demonstration is not None and (shown := _value(row, self.demonstration, "demonstration")) is not None:
            task["demonstration"] = _demonstration(shown)
        kind = "" if self.type is None else _value(row, self.type, "type")
        if not isinstance(kind, str | int):
            raise RowError("type", f"the type is {kind!r:.60}; expected text")
        return RowTask(task, str(kind), self._difficulty(row))

    def _prompt(self, row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        if self.template is None:
            assert self.prompt is not None
            prompt = _value(row, self.prompt, "prompt")
            if isinstance(prompt, list):
                return _prompt_messages(prompt)
        else:
            prompt = _FIELD.sub(lambda match: _placed(match, row), self.template)
        if not isinstance(prompt, str) or not prompt.strip():
            raise RowError("prompt", f"the prompt is {prompt!r:.60}; expected text, or a list of messages")
        return prompt

    def _answer(self, value: Any) -> Any:
        if self.answer_after is not None:
            _, marker, value = as_text(value).rpartition(self.answer_after)
            if not marker:
                raise RowError("answer_after", f"the answer has no {self.answer_after!r}")
            value = value.strip()
        if value is None or value in ("", []) or (isinstance(value, str) and not value.strip()):
            raise RowError("answer", f"the answer is {value!r}, so no episode could be right")
        for alternative in value if isinstance(value, list) else [value]:
            if self.numeric and last_number(as_text(alternative)) is None:
                raise RowError("success", f"the answer {alternative!r:.60} has no number")
        return value

    def _difficulty(self, row: Mapping[str, Any]) -> int:
        """Return the difficulty: a whole number, or a text with exactly one, such as "Level 3"."""
        if self.difficulty is None:
            return 0
        value = _value(row, self.difficulty, "difficulty")
        numbers = re.findall(r"[0-9]{1,9}", value) if isinstance(value, str) else [value]
        if len(numbers) != 1 or isinstance(numbers[0], bool) or not isinstance(numbers[0], int | str):
            raise RowError("difficulty", f"the difficulty is {value!r:.60}; expected a whole number, or text with one")
        number = int(numbers[0])
        if not 0 <= number <= MOST_DIFFICULTY:
            raise RowError("difficulty", f"the difficulty is {number}; expected 0 to {MOST_DIFFICULTY}")
        return number


def as_text(answer: Any) -> str:
    """Return an answer as text: text unchanged, other data as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, sort_keys=True)


def _value(row: Mapping[str, Any], column: str, key: str) -> Any:
    if column not in row:
        names = [str(name) for name in row]
        raise RowError(key, f"no column {column!r}; the columns are {', '.join(sorted(names))}", nearest(column, names))
    return row[column]


def _placed(match: re.Match[str], row: Mapping[str, Any]) -> str:
    """Return the text in place of `{column}`, `{{` or `}}`."""
    if not match[1]:
        return match[0][0]
    value = _value(row, match[1], "template")
    if value is None:
        raise RowError("template", f"the column {match[1]!r} is empty")
    return as_text(value)


def _prompt_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    for message in messages:
        valid = isinstance(message, Mapping) and message.get("role") in PROMPT_ROLES
        if not valid or not isinstance(message.get("content"), str):
            raise RowError(
                "prompt", f"the message is {message!r:.60}; expected a role of {', '.join(PROMPT_ROLES)} and text"
            )
    if not messages or messages[-1]["role"] != "user":
        raise RowError("prompt", "the last message of the prompt is not the user's")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _demonstration(value: Any) -> str | list[dict[str, Any]]:
    if isinstance(value, str) and value.strip():
        return value
    replies = [
        {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name) is not None}
        for message in (value if isinstance(value, list) else [])
        if isinstance(message, Mapping) and message.get("role") == "assistant"
    ]
    if not replies:
        raise RowError(
            "demonstration", f"the demonstration is {value!r:.60}; expected text, or messages with the assistant's"
        )
    return replies


def invalid(key: str, message: str) -> SpecError:
    """Return the error of a key of the environment."""
    return SpecError.at(f"environment.{key}", message)
