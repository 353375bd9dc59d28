"""Check that tool calls survive the way from an action to tokens and back, in the format of the agent.

An action is written by the action format (`components.rollout.formats`), rendered by the chat template, tokenized,
parsed from the tokens as an engine does, and read by the action format as the agent loop does.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any, Literal

from components import aio
from components.environments.protocol import Step
from components.errors import EspalierError, ResourceError
from components.evaluation.checks import PropertyCheck, check_result, skipped_check
from components.rollout.action_format import Tools, UnparsedAction
from components.rollout.formats import text_tool
from components.trajectories.chat import ChatFormat
from flows.certification.subject import Subject, call_message, tool
from flows.certification.template import written

NAME = "tool_calls"
PROBES = [
    tool("search", "Searches.", query={"type": "string"}, filters={"type": "object"}, limit={"type": "integer"}),
    tool("note", "Notes.", text={"type": "string"}),
]
Calls = list[tuple[str, dict[str, Any]]]
CASES: dict[str, Calls] = {
    "plain": [("note", {"text": "milk"})],
    "nested": [
        ("search", {"query": "a", "filters": {"all": [{"any": [1, 2.5, -3]}, {"not": {}}], "k": []}, "limit": 0})
    ],
    "constants": [("search", {"query": "", "filters": {"yes": True, "no": False, "none": None}, "limit": -1})],
    "unicode": [("note", {"text": "Zoë, 東京, Ωmega, 🙂, e\u0301, \u202eabc\u202c"})],
    "quotes": [
        ("note", {"text": 'it\'s "quoted", \\"escaped\\", \\n no line break, C:\\temp, {"a": \'b\'}, [f(x=1)]'})
    ],
    "lines": [("note", {"text": "first\n  second\n\n\tthird"})],
    "markup": [("note", {"text": '<tool_call>{"name": 1}</tool_call> <b>bold</b> &amp; ```python'})],
    "several": [
        ("note", {"text": "one"}),
        ("search", {"query": "two", "filters": {}, "limit": 2}),
        ("note", {"text": "3"}),
    ],
}
"""Calls of the probe tools, by name of the difficulty."""
SPOKEN = "I look it up."


def check_tool_calls(subject: Subject) -> PropertyCheck:
    """Write and read the probe calls, and a call of each tool of the environment."""
    failures = []
    count = 0
    native, form = subject.agent.format == "native", subject.chat.call_form
    contents = ("", SPOKEN) if native and (form is None or form.with_text) else ("",)
    for tools, cases in ((PROBES, CASES), (subject.openings[0].tools, _own_cases(subject.openings[0].tools))):
        for name, calls in cases.items():
            if not _expressible(subject, tools, calls):
                continue
            count += 1
            for content in contents:
                if problem := _round_trip(subject, tools, calls, content):
                    failures.append(f"{name}: {problem}")
                    break
    if not count:
        return skipped_check(NAME, f"agent.format={subject.agent.format} and the environment have no tool calls")
    written_by = ("the chat template" if subject.chat.native_tools else "text in the system message") if native else ""
    figures = {"calls": count, "format": subject.agent.format, "tools_by": written_by or "text"}
    if normal_form := unicode_form(subject.chat):
        figures["unicode"] = f"the tokenizer changes text to {normal_form}: other spellings of a character are lost"
    return check_result(NAME, failures, figures)


def _own_cases(tools: Tools) -> dict[str, Calls]:
    """Return a call of each tool of the environment."""
    return {
        item["function"]["name"]: [(item["function"]["name"], _example(item["function"].get("parameters") or {}))]
        for item in tools
    }


def _expressible(subject: Subject, tools: Tools, calls: Calls) -> bool:
    """Return True if the agent's format and the chat template have such calls: of several tools, or of one tool with a
    text."""
    match subject.agent.format:
        case "chat":
            return text_tool(tools) is not None
        case "native":
            return len(calls) == 1 or not subject.chat.single_call
        case "react":
            return len(calls) == 1
    return True


def _round_trip(subject: Subject, tools: Tools, calls: Calls, content: str) -> str:
    """Return the difference between the calls and what is read back; empty if there is none."""
    style, chat = subject.format(), subject.chat
    messages, offered = style.opening([{"role": "user", "content": "Go on."}], tools)
    action = call_message([(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls], content)
    message = style.write(action)
    taken: list[dict[str, Any]] = []

    async def take(done: dict[str, Any]) -> Step:
        taken.append(done)
        return Step([{"role": "tool", "tool_call_id": "call_0", "content": "ok"}])

    try:
        try:
            [stream] = chat.streams([*messages, message], offered)
            tokens = stream.token_ids[slice(*stream.spans[0])]
        except ResourceError:  # the template renders an answer differently from what a model samples
            prompt = chat.prompt_ids(messages, offered)
            tokens = [*chat.encode(written(chat, message, prompt, offered)), chat.id_of_end(message)]
        parsed = chat.parse(tokens, 0, offered)
        if parsed["content"].strip() != message["content"].strip():
            return f"the text {message['content']!r:.100} is parsed as {parsed.get('content')!r:.100}"
        aio.run(style.act({**parsed, "content": parsed["content"].strip()}, take))
    except UnparsedAction as error:
        return f"the call cannot be read back: {error}"
    except EspalierError as error:
        return str(error)
    expected, read = _plain(calls, chat=subject.agent.format == "chat"), [_read(done) for done in taken]
    if form := unicode_form(chat):
        expected = json.loads(unicodedata.normalize(form, json.dumps(expected, ensure_ascii=False)))
    actual = [item for part in read for item in part]
    if actual != expected:
        before, after = (json.dumps(data, ensure_ascii=False) for data in (expected, actual))
        return f"{before:.200} is read back as {after:.200}"
    return ""


def unicode_form(chat: ChatFormat) -> Literal["NFC", "NFKC"] | None:
    """Return the Unicode normal form to which the tokenizer changes text; None if it keeps text as it is."""
    probes: list[tuple[str, Literal["NFC", "NFKC"]]] = [("\ufb01", "NFKC"), ("e\u0301", "NFC")]
    for text, form in probes:
        if chat.tokenizer.decode(chat.encode(text)) == unicodedata.normalize(form, text):
            return form
    return None


def _plain(calls: Calls, *, chat: bool) -> list[Any]:
    """Return calls as comparable data. chat: the text of the action alone."""
    return [next(iter(arguments.values())) if chat else [name, arguments] for name, arguments in calls]


def _read(action: dict[str, Any]) -> list[Any]:
    """Return the calls of an action as comparable data, or its text."""
    calls = [call["function"] for call in action.get("tool_calls") or []]
    return [[call["name"], json.loads(call["arguments"])] for call in calls] or [action["content"]]


def _example(schema: dict[str, Any]) -> Any:
    """Return a value that fits a JSON schema, as far as its types say."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            return {name: _example(item) for name, item in (schema.get("properties") or {}).items()}
        case "array":
            return [_example(schema.get("items") or {})]
        case "integer":
            return 3
        case "number":
            return 1.5
        case "boolean":
            return True
    return 'Zoë\'s "list"'
