"""OpenAI's stored chat completions, and the input and output files of its batches.

A stored completion is listed without its input: the messages come from `GET /chat/completions/ID/messages`, whose ids
begin with that of the completion, or stand beside it in `messages`. A request of a batch and its response have the same
`custom_id`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.data.logs import payloads
from components.data.logs.parts import LogPart

CHAT = "/v1/chat/completions"


def stored(row: Mapping[str, Any]) -> list[LogPart] | None:
    """Return the part of a stored completion or of one of its messages; None for another row."""
    name = str(row.get("id"))
    if row.get("object") == "chat.completion":
        tools = row.get("tools") or []
        return [LogPart(name, -1, payloads.messages(row.get("messages")), payloads.answers(row), tools)]
    completion, _, number = name.rpartition("-")
    if completion and number.isdecimal() and "role" in row:
        return [LogPart(completion, int(number), payloads.messages([row]))]
    return None


def batch(row: Mapping[str, Any]) -> list[LogPart] | None:
    """Return the part of a request or of a response of a batch; None for another row."""
    if not isinstance(name := row.get("custom_id"), str):
        return None
    if isinstance(body := row.get("body"), Mapping):
        if row.get("url", CHAT) != CHAT:
            return [LogPart(name, problem=f"a request to {row['url']!r:.60}; expected {CHAT}")]
        return [LogPart(name, 0, payloads.messages(body.get("messages")), tools=body.get("tools") or [])]
    response = row.get("response") or {}
    answer = response.get("body") or {}
    if row.get("error") or response.get("status_code") != 200:
        error = row.get("error") or answer.get("error") or f"status {response.get('status_code')}"
        return [LogPart(name, 1, error=str(error.get("message", error) if isinstance(error, Mapping) else error))]
    return [LogPart(name, 1, answers=payloads.answers(answer))]


def one_call(parts: Sequence[LogPart]) -> list[LogPart]:
    """Return the call whose halves the parts are."""
    whole = LogPart(parts[0].trace)
    if len({part.start for part in parts}) < len(parts):
        whole.problem = "the id is there twice. Import files that repeat ids one by one"
    for part in parts:
        whole.messages = [*whole.messages, *part.messages]
        whole.answers = whole.answers or part.answers
        whole.tools = whole.tools or part.tools
        whole.error = whole.error or part.error
        whole.problem = whole.problem or part.problem
    if whole.problem:
        pass
    elif not whole.messages:
        whole.problem = (
            "the input is missing. Add the batch's input file to data.path, or for a stored completion the messages of "
            "GET /chat/completions/ID/messages, as a file in data.path or in the key messages"
        )
    elif not (whole.answers or whole.error):
        whole.problem = "the answer is missing. Add the batch's output file, or the stored completion, to data.path"
    whole.problem = whole.problem and f"{whole.trace}: {whole.problem}"
    return [whole]
