"""Declaration of a form: the shape of a row, and its conversion to an example and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.data.columns import OPTIONAL, RowColumns, kind_of
from components.data.examples import Candidate, DataExample, RowProblem
from components.data.logs.parts import LogPart
from components.data.messages import answer, context_only, read_messages, read_tools
from components.trajectories.schema import History, Message, Trajectory

Records = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Form:
    """A form of rows."""

    name: str
    """Name, as `data.form`."""
    summary: str
    """Short description for lists of forms."""
    columns: Mapping[str, tuple[str, ...]]
    """Required columns: our names, and the names that they commonly have, in order of preference."""
    read: Callable[[RowColumns], DataExample]
    """Conversion of a row. Raises RowProblem for a row that gives no example."""
    write: Callable[[Sequence[Trajectory]], Records] | None = None
    """Conversion of the scored trajectories of one scenario to rows; None if the form is not exported as rows."""
    more: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Optional columns of this form only."""
    thumb: str = ""
    """Required column whose values are two, good and bad; empty without one."""
    parts: Callable[[Mapping[str, Any]], list[LogPart] | None] | None = None
    """Parts of conversations in a row of a log, from which `components.data.logs.joining` makes the rows that `read`
    converts; None for a row of another form."""
    assemble: Callable[[Sequence[LogPart]], list[LogPart]] | None = None
    """Calls of the parts of a conversation; None: each part is a call."""
    expresses: Callable[[Trajectory, Sequence[Message]], bool] = lambda trajectory, messages: True
    """True if a row can hold an episode that is one conversation, with these messages."""

    def names(self) -> list[str]:
        """Return the names that `data.columns` may map."""
        return [*self.columns, *self.more, *OPTIONAL]

    def reading(self, values: Mapping[str, Any], mapped: Mapping[str, str]) -> dict[str, str]:
        """Return our names of the columns of a row that the form may read, by their names in the row."""
        columns = RowColumns(values, {**self.columns, **self.more}, mapped)
        return {theirs: name for name in reversed(self.names()) if (theirs := columns.source(name)) is not None}

    def fits(self, values: Mapping[str, Any], mapped: Mapping[str, str]) -> bool:
        """Return True if a row has the required columns."""
        columns = RowColumns(values, self.columns, mapped)
        try:
            return all(columns.get(name) is not None for name in self.columns)
        except RowProblem:
            return False

    def example(
        self, values: Mapping[str, Any], mapped: Mapping[str, str], tools: Sequence[dict[str, Any]] = ()
    ) -> DataExample:
        """Return the example of a row. mapped: the user's columns by our names. tools: those of a row that lists none.
        Raises RowProblem."""
        columns = RowColumns(values, {**self.columns, **self.more}, mapped)
        for name in self.columns:
            columns.need(name)
        example = self.read(columns)
        example.name = example.name or columns.label("id")
        example.type = example.type or columns.label("type")
        difficulty = columns.number("difficulty")
        if difficulty is not None and difficulty in range(1, 6):
            example.difficulty = int(difficulty)
        listed = columns.get("tools")
        example.tools = example.tools or (list(tools) if listed in (None, "") else read_tools(listed))
        system = columns.get("system")
        if isinstance(system, str) and system:
            for candidate in example.candidates:
                _add_system(candidate, system)
        example.input = columns.unread() | example.input
        return example


def conversation(messages: list[Message], reward: float | None = 1.0) -> Candidate:
    """Return a candidate of one history."""
    return Candidate([History(messages)], reward)


def world(name: str) -> str:
    """Return the environment in the id of a task, `webshop` of `webshop_4545`; empty without one."""
    environment, _, number = name.rpartition("_")
    return environment if number.isdecimal() else ""


def prompt_messages(value: Any) -> list[Message]:
    """Return a prompt as messages, none of them trained: text is a user message. Raises RowProblem."""
    if not isinstance(value, str | list):
        raise RowProblem(f"the prompt is {kind_of(value)}; expected text or a list of messages")
    if isinstance(value, str) and not value.lstrip().startswith('[{"'):
        if not value.strip():
            raise RowProblem("the prompt is empty", "empty")
        return [Message("user", value)]
    return context_only(read_messages(value))


def completion_messages(value: Any) -> list[Message]:
    """Return a completion as messages: text is an assistant message. Raises RowProblem."""
    if isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith('[{"')):
        return read_messages(value)
    if not isinstance(value, str):
        raise RowProblem(f"the completion is {kind_of(value)}; expected text or a list of messages")
    if not value.strip():
        raise RowProblem("the completion is empty", "empty")
    return [answer(value)]


def _add_system(candidate: Candidate, system: str) -> None:
    history = candidate.histories[0]
    if not history.messages or history.messages[0].role != "system":
        history.messages.insert(0, Message("system", system))
