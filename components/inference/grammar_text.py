"""Lark grammars of response forms in the model's own format: calls in tags or as a Python list, JSON, and text.

A call has the format that `ChatFormat` parses, with arguments of the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from components.errors import Problem, SpecError
from components.inference.json_schemas import with_finite_numbers
from components.trajectories.call_forms.pythonic import WORD

WHITESPACE = r"[\x20\x0A]{1,16}"
"""Whitespace between the parts of a JSON text: limited, so that no response consists of it."""
_OPTIONS: Any = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", **_OPTIONS}
del _COMPACT["whitespace_pattern"]
_MORE = '(", " call)*'
"""Further calls of a list."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without `parameters`."""
_PLAIN = {
    "$comment", "$defs", "$id", "$schema", "additionalProperties", "default", "definitions", "description", "examples",
    "properties", "required", "title", "type",
}  # fmt: skip
"""Keywords of a parameters' schema that can be written as the keyword arguments of a pythonic call."""


def compact(grammar: str) -> str:
    """Return a grammar whose JSON texts have one form of whitespace, `{"a": 1, "b": [2, 3]}`, for servers: llguidance
    1.7 does not limit the length of whitespace as later versions do."""
    return grammar.replace(json.dumps(_OPTIONS)[1:-1], json.dumps(_COMPACT)[1:-1])


def with_end(grammar: str, stop_ids: Collection[int]) -> str:
    """Return the Lark grammar of the same texts, each followed by one of the stop tokens.

    For servers whose llguidance knows only the tokenizer's own end-of-sequence token, which is not always one that ends
    a response. `::=` is escaped, because grammars with it are read as GBNF."""
    ids = ",".join(map(str, sorted(stop_ids)))
    return f"start: response end\nend: <[{ids}]>\nresponse{grammar.removeprefix('start')}".replace("::=", r"\u003a:=")


def tagged_call(functions: Sequence[dict[str, Any]]) -> str:
    """Return the Lark grammar of one call `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    return "\n".join(['start: "<tool_call>" call', *_tagged_rules(functions)])


def tagged_or_text(functions: Sequence[dict[str, Any]], single: bool) -> str:
    """Return the Lark grammar of a text that contains calls, or none. single: one call at most."""
    start = [f"start: (head call){'?' if single else '*'} TEXT", 'head[lazy]: ANY "<tool_call>"', r"ANY: /(?s:.*)/"]
    return "\n".join([*start, r"TEXT: /(?s:.*)/ & ~/(?s:.*<tool_call>.*)/", *_tagged_rules(functions)])


def tagged_or_json(functions: Sequence[dict[str, Any]], single: bool, content: str) -> str:
    """Return the Lark grammar of a JSON text or of calls. single: one call at most. content: grammar of the JSON."""
    calls = '"<tool_call>" call' + ("" if single else ' ("\\n<tool_call>" call)*')
    return "\n".join([f"start: {content} | {calls}", *_tagged_rules(functions)])


def _tagged_rules(functions: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rules of `call`, a call after its opening tag."""
    rules = [f"call: {_either('call', functions)}"]
    for place, function in enumerate(functions):
        parameters = with_finite_numbers(function.get("parameters") or NO_PARAMETERS)
        definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        body = {
            **definitions,
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": {**parameters, "type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        rules.append(f'call{place}: "\\n" {json_text(body)} "\\n</tool_call>"')
    return rules


def pythonic_call(functions: Sequence[dict[str, Any]]) -> str:
    """Return the Lark grammar of one call `[name(key=value, ...)]`, with the arguments in the order of the schema.
    Raises SpecError for a schema that is no plain object."""
    return "\n".join(['start: "[" call "]"', *_pythonic_rules(functions)])


def pythonic_or_text(functions: Sequence[dict[str, Any]], single: bool) -> str:
    """Return the Lark grammar of a text, or of a list of calls that a text may precede. single: one call at most.
    Raises as `pythonic_call`."""
    heads = [
        f"head{place}[lazy]: BEFORE {_literal('[' + function['name'] + '(')}"
        for place, function in enumerate(functions)
    ]
    first = " | ".join(f'head{place} arguments{place} ")"' for place in range(len(functions)))
    return "\n".join(
        [
            f'start: TEXT | first {_MORE * (not single)} "]"',
            f"first: {first}",
            *heads,
            r"BEFORE: /(?s:(.*\n)?)/",
            r"TEXT: /(?s:.*)/ & ~/(?s:(.*\n)?\s*\[\s*[\w.\-]+\s*\(.*)/",
            *_pythonic_rules(functions),
        ]
    )


def pythonic_or_json(functions: Sequence[dict[str, Any]], single: bool, content: str) -> str:
    """Return the Lark grammar of a JSON text or a list of calls. single: one call at most. content: grammar of the
    JSON. Raises as `pythonic_call`."""
    return "\n".join([f'start: {content} | "[" call {_MORE * (not single)} "]"', *_pythonic_rules(functions)])


def _pythonic_rules(functions: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rules of `call`, a call of a list, and of `argumentsK`, the arguments of function K."""
    rules = [f"call: {_either('call', functions)}"]
    for place, function in enumerate(functions):
        parameters = with_finite_numbers(function.get("parameters") or NO_PARAMETERS)
        if more := sorted(parameters.keys() - _PLAIN):
            text = (
                f"the arguments of {function['name']!r} are constrained by {', '.join(more)}, which cannot be enforced "
                "in this model's call format [name(key=value)]; use properties and required"
            )
            raise SpecError([Problem("tools", text)])
        definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        arguments = [
            (f"argument{place}_{number}", key, schema)
            for number, (key, schema) in enumerate((parameters.get("properties") or {}).items())
        ]
        required = parameters.get("required") or []
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise SpecError([Problem("tools", f"{function['name']!r}: `required` must be a list of names")])
        if unknown := sorted(set(required) - {key for _, key, _ in arguments}):
            text = f"{function['name']!r} requires {', '.join(unknown)}, which its properties do not list"
            raise SpecError([Problem("tools", text)])
        for rule, key, schema in arguments:
            value = json_text({**definitions, **schema} if isinstance(schema, dict) else schema)
            start, end = (f"{key}=", "") if WORD.fullmatch(key) else (f"**{{{json.dumps(key)}: ", "}")
            rules.append(f"{rule}: {_literal(start)} {value} {_literal(end) if end else ''}")
        rules += _sequence(f"arguments{place}", [(rule, key in required) for rule, key, _ in arguments])
        rules.append(f"call{place}: {_literal(function['name'] + '(')} arguments{place} {_literal(')')}")
    return rules


def _either(rule: str, functions: Sequence[dict[str, Any]]) -> str:
    return " | ".join(f"{rule}{place}" for place in range(len(functions)))


def _sequence(name: str, items: list[tuple[str, bool]]) -> list[str]:
    """Return rules for a comma-separated sequence: each item in order, the required ones always. `name` begins one,
    `name_rK` and `name_fK` continue it before item K: after an item, and as the first one."""
    rules = [f'{name}_r{len(items)}: ""', f'{name}_f{len(items)}: ""', f"{name}: {name}_f0"]
    for place, (item, required) in enumerate(items):
        for kind, comma in (("r", '", " '), ("f", "")):
            taken = f"{comma}{item} {name}_r{place + 1}"
            rules.append(f"{name}_{kind}{place}: {taken}" + ("" if required else f" | {name}_{kind}{place + 1}"))
    return rules


def json_text(schema: Any) -> str:
    options = {"x-guidance": _OPTIONS}
    return f"%json {json.dumps({**options, **schema, **options} if isinstance(schema, dict) else schema)}"


def _literal(text: str) -> str:
    """Return a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
