"""Known differences between Espalier's readers of tool calls and others, each with its reason. `explain` returns None
for a difference that nobody has explained, which a suite reports as failed."""

from __future__ import annotations

import ast
import json
import keyword
from collections.abc import Callable
from typing import Any, NoReturn

from components.trajectories.call_forms import MARKS
from tests.conformance.tool_call_forms import NAMES
from tests.conformance.tool_call_readers import VLLM, Reading

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


def _before(text: str) -> str:
    """Return the text before the first marker of a call."""
    return text[: min((place for mark in MARKS if (place := text.find(mark)) >= 0), default=len(text))]


def _spaces_kept(text: str, ours: Reading, other: Reading) -> bool:
    return ours.values == other.values and ours.content == other.content.strip()


def _text_after(text: str, ours: Reading, other: Reading) -> bool:
    return ours.values == other.values and other.content.strip() == _before(text).strip()


def _whole_text(text: str, ours: Reading, other: Reading) -> bool:
    return ours.values == other.values and other.content == text


def _not_offered(text: str, ours: Reading, other: Reading) -> bool:
    offered = [call for call in ours.values or () if call[0] in NAMES]
    return offered != ours.values and offered == (other.values or [])


def _untyped(text: str, ours: Reading, other: Reading) -> bool:
    return ours.values is not None and _as_text(ours.values, other.values)


def _as_text(value: Any, other: Any) -> bool:
    """Return True for equal values, parts of which the other has as text."""
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_as_text, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_as_text(value[key], other[key]) for key in value)
    if isinstance(other, str) and not isinstance(value, str):
        return other == json.dumps(value, ensure_ascii=False) or other.lower() == str(value).lower()
    return bool(value == other)


def _without_types(text: str, ours: Reading, other: Reading) -> bool:
    return other.values is not None and _as_text(other.values, ours.values)


def _without_marker(text: str, ours: Reading, other: Reading) -> bool:
    """Calls of the other in order, some of which are missing here."""
    rest = iter(other.values or ())
    return text.count("<function=") > text.count("<tool_call>") and all(call in rest for call in ours.values or ())


def _older_list(text: str, ours: Reading, other: Reading) -> bool:
    return text.startswith("[TOOL_CALLS][{") and ours.calls is not None


def _some(text: str, ours: Reading, other: Reading) -> bool:
    """Some of the calls, in order."""
    rest = iter(ours.values or ())
    return ours.calls is not None and all(call in rest for call in other.values or ())


def _first_list(text: str, ours: Reading, other: Reading) -> bool:
    lists = max(text.count("<|tool_call_start|>"), text.count("<tool_calls>"))
    return lists > 1 and _some(text, ours, other)


def _no_arguments(text: str, ours: Reading, other: Reading) -> bool:
    filled = [(name, given or {}) for name, given in other.values or ()]
    return '"parameters": {}' in text and ours.values == filled


def _stripped_keys(text: str, ours: Reading, other: Reading) -> bool:
    stripped = [(name, {key.strip(): value for key, value in given.items()}) for name, given in other.values or ()]
    return stripped == ours.values


def _text_around(text: str, ours: Reading, other: Reading) -> bool:
    return _damaged(text, ours, other) and (text.strip()[0] != "{" or text.strip()[-1] != "}")


def _damaged(text: str, ours: Reading, other: Reading) -> bool:
    return ours.calls is None and other.calls is not None


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
FAMILIES = tuple(VLLM.keys() - {"hermes", "pythonic"})
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
    (
        ("transformers",),
        "reasoning is read in a step before (components.trajectories.reasoning), so it is content here",
        _thinking,
    ),
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
    (FAMILIES, "text around calls is stripped here; vLLM keeps spaces and line breaks", _spaces_kept),
    (FAMILIES, "text after a call is kept here; vLLM drops it", _text_after),
    (("muse_glimmer",), "the content has no calls here; vLLM leaves them in the content", _whole_text),
    (("glm45",), "a value contains </tool_call>: vLLM ends the call there", _tag_in_argument),
    (("lfm2", "hunyuan_a13b"), "a second list of calls: read here; vLLM reads the first", _first_list),
    (("cohere_command3",), "a call without arguments has {} here; vLLM has an empty text", _no_arguments),
    (("cohere_command3",), "a call without an id is read here, not by vLLM", _some),
    (("muse_glimmer",), "values have their parameters' types here; vLLM reads JSON where it is JSON", _without_types),
    (("mistral",), "the list of older models: vLLM reads it with Mistral's own tokenizer only", _older_list),
    (("deepseek_v3",), "line breaks in arguments, and none after them: read here, not by vLLM", _some),
    (("deepseek_v32",), "white space around names of arguments: dropped here, not by vLLM", _stripped_keys),
    (("qwen3_coder",), "a call without <tool_call> before it is text here; vLLM reads it", _without_marker),
    (FAMILIES, "calls of tools that are not offered are read here, and the environment reports them", _not_offered),
    (FAMILIES, "values without a type are JSON where they are JSON here; vLLM has text", _untyped),
    (("llama3_json",), "text around a call: all is text here; vLLM reads the call and drops the text", _text_around),
    (FAMILIES, "a damaged call is text here, which the model is told; vLLM reads the part that it can", _damaged),
    (PYTHONIC, "infinity and lone surrogates are no JSON: refused here, passed on by vLLM", _no_strict_json),
    (PYTHONIC, "sets, joined and prefixed strings, hexadecimal and grouped numbers: read by vLLM only", _python_only),
    (PYTHONIC, r"\/ is a slash as in JSON, \N{...} stays text; vLLM reads both as Python", _escapes),
)
"""Readers, reason and rule; the first that holds counts."""
