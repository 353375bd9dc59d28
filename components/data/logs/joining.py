"""Conversations of a log, joined from the parts in its rows.

The calls of an agent are rows of their own, and each has the messages of the earlier ones in its prompt. Calls of one
trace are joined where the prompt of the later one begins with the conversation of the earlier one: the last prompt and
its answer are the conversation, and each answer that a call of the log returned is trained on once. A call whose prompt
begins otherwise (another branch, a sub-agent, a compacted context) begins a conversation of its own, in which other
answers are context.

Parts wait in a temporary database on disk, so memory is bounded by the largest trace. A row that cannot be read ends
the import, because the conversation that it belongs to would be incomplete; an entry that cannot be used drops its
conversation as a whole.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from typing import Any

from components.data.examples import RowProblem
from components.data.forms.base import Form
from components.data.logs.parts import LogPart
from components.data.messages import read_messages, read_tools
from components.data.rows import BrokenRow, DataRow, OnBroken
from components.data.sources import rows
from components.data.spec import SourceSpec
from components.errors import ResourceError
from components.trajectories.schema import Message

_TABLE = "create table part (trace text, start, source text, number integer, data text)"
_ADD = "insert into part values (?, ?, ?, ?, ?)"
_ORDERED = """select first, source, number, data from part join
(select trace as id, min(rowid) as first from part group by trace) on id = trace order by first, start, part.rowid"""


def form_rows(form: Form, source: SourceSpec, on_broken: OnBroken) -> Iterator[DataRow]:
    """Yield the rows of a source for a form: of a log its conversations, at most `source.limit`, numbered by the row of
    their last call. on_broken: called with each conversation that cannot be used. Raises ResourceError if the source,
    or a row of a log, cannot be read."""
    if form.parts is None:
        return rows(source, on_broken)
    return islice(_conversations(form, source.model_copy(update={"limit": None}), on_broken), source.limit)


def _conversations(form: Form, source: SourceSpec, on_broken: OnBroken) -> Iterator[DataRow]:
    with closing(sqlite3.connect("")) as database:  # a file in the temporary folder, removed when it is closed
        database.execute(_TABLE)
        for row in rows(source):
            parts = _parts(form, row)
            if parts is None:
                on_broken(BrokenRow(row.number, row.source, f"no row of the form {form.name}: {form.summary}"))
            for part in parts or []:
                database.execute(_ADD, (part.trace, part.start, row.source, row.number, json.dumps(asdict(part))))
        for _, entries in groupby(database.execute(_ORDERED), key=lambda row: row[0]):
            group = list(entries)
            _, file, number, _ = group[-1]
            try:
                for values in _joined(form, [LogPart(**json.loads(data)) for *_, data in group]):
                    yield DataRow(number, file, values)
            except RowProblem as problem:
                on_broken(BrokenRow(number, file, str(problem)))


def _parts(form: Form, row: DataRow) -> list[LogPart] | None:
    assert form.parts is not None
    try:
        return form.parts(row.values)
    except (RowProblem, LookupError, TypeError, AttributeError, ValueError) as error:
        reason = str(error) if isinstance(error, RowProblem) else f"{type(error).__name__}: {error}"
        text = f"{row.place}: the row is not in the shape of the form {form.name}: {reason}"
        raise ResourceError(f"{text}. Correct or remove it; its conversation would be incomplete") from None


@dataclass(slots=True)
class _Conversation:
    """Messages of joined calls, with the keys that they are compared by."""

    messages: list[dict[str, Any]]
    keys: list[Any]
    tools: dict[str, Any]


def _joined(form: Form, parts: Sequence[LogPart]) -> Iterator[dict[str, Any]]:
    """Yield the conversations of one trace as rows of messages. Raises RowProblem for a trace that cannot be used."""
    calls = form.assemble(parts) if form.assemble else [part for part in parts if not part.scores]
    for call in calls:
        if call.problem:
            raise RowProblem(call.problem)
    scores = {name: value for part in parts for name, value in part.scores.items()}
    errors = [call.error for call in calls if call.error]
    conversations = _conversations_of(call for call in calls if call.answers)
    if errors and not conversations:
        raise RowProblem(f"the call failed: {errors[0]}")
    for conversation in conversations:
        missing = {"token_ids": "the log has no token ids; the model's own tokenizer writes them"}
        missing |= {"errors": f"{len(errors)} failed calls of the trace are left out: {errors[0]}"} if errors else {}
        tools = list(conversation.tools.values())
        own = {"id": parts[0].trace, "messages": conversation.messages, "tools": tools, "missing": missing}
        yield {**scores, **own}


def _conversations_of(calls: Iterable[LogPart]) -> list[_Conversation]:
    known: list[_Conversation] = []
    for call in calls:
        prompt = [_key(message) for message in read_messages(call.messages)]
        tools = {tool["function"]["name"]: tool for tool in read_tools(call.tools)}
        for answer in call.answers:
            keys = [*prompt, _key(read_messages([answer])[0])]
            if any(other.keys[: len(keys)] == keys for other in known):
                continue  # logged twice, by two instrumentations
            extended = [other for other in known if other.keys == prompt[: len(other.keys)]]
            earlier = max(extended, key=lambda other: len(other.keys), default=_Conversation([], [], {}))
            known = [other for other in known if other is not earlier]
            new = [_context(message) for message in call.messages[len(earlier.keys) :]]
            known.append(_Conversation([*earlier.messages, *new, answer], keys, earlier.tools | tools))
    return known


def _context(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of a prompt, which is not trained on."""
    return {**message, "weight": 0} if message.get("role") == "assistant" else dict(message)


def _key(message: Message) -> Any:
    """Return the part of a message that a later prompt repeats: ids of calls and reasoning may be left out of it."""
    calls = [(call.name, json.dumps(json.loads(call.arguments), sort_keys=True)) for call in message.tool_calls]
    return message.role, message.content.strip(), calls
