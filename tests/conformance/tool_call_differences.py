"""Known differences between Espalier's readers of tool calls and others, each with its reason. `explain` returns None
for a difference that nobody has explained, which a suite reports as failed."""

from __future__ import annotations

import ast
import json
import keyword
from collections.abc import Callable
from typing import Any, NoReturn

from tests.conformance.tool_call_readers import Reading

Rule = Callable[[str, Reading, Reading], bool]
"""Whether a difference has a reason, by the text, Espalier's reading and the other."""


def same(ours: Reading, other: Reading) -> bool:
    """Return True for equal calls with equal text around them, and for the same text without calls."""
    if ours.values != other.values:
        return False
    return ours.calls is None or ours.content == other.content


def explain(reader: str, text: str, ours: Reading, other: Reading) -> str | None:
    """Return the reason of a difference."""
    return next((reason for readers, reason, rule in RULES if reader in readers and rule(text, ours, other)), None)


def _strict(arguments: str) -> bool:
    """Return True for a JSON object without NaN, infinity and lone surrogates."""

    def reject(_: str) -> NoReturn:
        raise ValueError

    try:
        arguments.encode()
        return isinstance(json.loads(arguments, parse_constant=reject), dict)
    except ValueError:
        return False


def _tag_in_argument(text: str, ours: Reading, other: Reading) -> bool:
    return any("</tool_call>" in arguments for _, arguments in ours.calls or ())


def _open_call(text: str, ours: Reading, other: Reading) -> bool:
    return ours.calls is None and other.calls is not None and "</tool_call>" not in text.rpartition("<tool_call>")[2]


def _only_spaces(text: str, ours: Reading, other: Reading) -> bool:
    return ours.values == other.values and ours.content == other.content.strip()


def _first_text(text: str, ours: Reading, other: Reading) -> bool:
    return ours.values == other.values and other.content == text[: text.find("<tool_call>")]


def _last_text(text: str, ours: Reading, other: Reading) -> bool:
    return ours.values == other.values and other.content == text.rpartition("</tool_call>")[2].strip()


def _thinking(text: str, ours: Reading, other: Reading) -> bool:
    return ours.values == other.values and ours.content.rpartition("</think>")[2].strip() == other.content


def _bare_name(text: str, ours: Reading, other: Reading) -> bool:
    return '{"name": "f"}' in text and ours.calls is not None


def _no_strict_json(text: str, ours: Reading, other: Reading) -> bool:
    return ours.calls is None and not all(_strict(arguments) for _, arguments in other.calls or ())


def _words_before(text: str, ours: Reading, other: Reading) -> bool:
    return bool(ours.calls and ours.content and other.calls is None)


def _other_names(text: str, ours: Reading, other: Reading) -> bool:
    names = [name for call, given in ours.values or () for name in (*call.split("."), *given)]
    return any(not name.isidentifier() or keyword.iskeyword(name) for name in names)


def _narrow_names(text: str, ours: Reading, other: Reading) -> bool:
    """vLLM's pattern of the start allows letters of ASCII first, and no dots."""
    names = [name for call, given in ours.values or () for name in (call, *given)]
    return other.calls is None and any(not name[:1].isascii() or name[:1] == "_" or "." in name for name in names)


def _entries(text: str, ours: Reading, other: Reading) -> bool:
    return "**{" in text and ours.calls is not None


def _line_break(text: str, ours: Reading, other: Reading) -> bool:
    return "\n" in text.strip() and bool(ours.calls) and not ours.content and other.calls is None


def _spaces(text: str, ours: Reading, other: Reading) -> bool:
    return text in (" [f(a=1)]", "[ f ( a = 1 , ) , ]") and ours.calls is not None


def _dropped(text: str, ours: Reading, other: Reading) -> bool:
    """Without a name: `f("x")`. After the list: `[f()]; g()`, and comments."""
    if ours.calls is not None:
        return False
    try:
        statements = ast.parse(text.strip()).body
    except SyntaxError:
        return False
    calls: list[Any] = [node for node in ast.walk(statements[0]) if isinstance(node, ast.Call)]
    return len(statements) > 1 or any(call.args for call in calls) or "# done" in text


def _repeated(text: str, ours: Reading, other: Reading) -> bool:
    return text in ("[f(a=1, a=2)]", "[f(a={1: 2})]") and ours.calls is None


def _python_only(text: str, ours: Reading, other: Reading) -> bool:
    return text in PYTHON_ONLY and ours.calls is None


def _escapes(text: str, ours: Reading, other: Reading) -> bool:
    return (r"\/" in text or r"\N" in text) and ours.calls is not None


PYTHON_ONLY = (
    "[f(a={1, 2})]",
    '[f(a="x" "y")]',
    "[f(a=f'x')]",
    r"[f(a=r'\d')]",
    "[f(a=0x10)]",
    "[f(a=1_000)]",
    "[f(a=007)]",
)
TAGGED = ("hermes", "transformers")
PYTHONIC = ("pythonic", "lfm2")
RULES: tuple[tuple[tuple[str, ...], str, Rule], ...] = (
    (TAGGED, "an argument contains </tool_call>: the other ends the call there and reads none", _tag_in_argument),
    (
        TAGGED,
        "a call without </tool_call> is text here, an observation tells the model; the other reads it",
        _open_call,
    ),
    (TAGGED, "arguments that are no strict JSON object: refused here, passed on by the other", _no_strict_json),
    (TAGGED, "a name alone is a call without arguments here; the other has none or null", _bare_name),
    (("hermes",), "text around calls is stripped here; vLLM keeps the line break before a call", _only_spaces),
    (("hermes",), "text after a call is kept here; vLLM drops all after the first call", _first_text),
    (("transformers",), "reasoning stays in the content here; transformers has a field for it", _thinking),
    (("transformers",), "text around several calls is joined here; transformers keeps the last", _last_text),
    (PYTHONIC, "text before the list: calls are read here; vLLM reads none", _words_before),
    (PYTHONIC, "names that are no identifiers of Python (or reserved words): read here, not by vLLM", _other_names),
    (PYTHONIC, "keys written **{...}: arguments here; vLLM reads none, or one named null", _entries),
    (
        ("pythonic",),
        "function names with dots, or not beginning with a letter of ASCII: not read by vLLM",
        _narrow_names,
    ),
    (("pythonic",), "a line break in quotes: read here, not by vLLM", _line_break),
    (("pythonic",), "spaces before the list or a name's parenthesis: read here, not by vLLM", _spaces),
    (PYTHONIC, "arguments without a name and text after the list: refused here, dropped by vLLM", _dropped),
    (PYTHONIC, "keys that repeat or are numbers: refused here; vLLM keeps the last, or writes text", _repeated),
    (PYTHONIC, "infinity and lone surrogates are no JSON: refused here, passed on by vLLM", _no_strict_json),
    (PYTHONIC, "sets, joined and prefixed strings, hexadecimal and grouped numbers: read by vLLM only", _python_only),
    (PYTHONIC, r"\/ is a slash as in JSON, \N{...} stays text; vLLM reads both as Python", _escapes),
)
"""Readers, reason and rule; the first that holds counts."""
