"""Forms of tool calls whose arguments are elements with plain text, typed by the schema of their parameter.

- Qwen3.5, Qwen3-Coder, Nemotron 3: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`
- GLM 4.5 to 5: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`
- MiniMax M2, DeepSeek V3.2: `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in a section
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from components.trajectories.call_forms.marked import CONSTANTS, Calls, MarkedForm, Tools, after_space, as_json, expect


@dataclass(frozen=True)
class ElementForm(MarkedForm):
    """Calls with a head, elements of arguments and an end, alone or several in a section.

    A call's end must follow its last argument: text between the arguments raises ValueError. So does a value with the
    start of another argument, which a misspelled end would make part of it.
    """

    marks: tuple[str, ...]
    close: str
    """Marker after the calls."""
    head: re.Pattern[str]
    """Start of a call, with the group `name`."""
    argument: re.Pattern[str]
    """An argument, with the groups `key`, `value` and, where the form says it, `string` (`true` or `false`)."""
    tail: str
    """End of a call; empty if `close` ends it."""
    section: bool = False
    """True if `close` may follow several calls."""

    def read_calls(self, text: str, at: int, tools: Tools) -> tuple[Calls, int]:
        calls: Calls = []
        while not calls or (self.section and not text.startswith(self.close, after_space(text, at))):
            head = self.head.match(text, after_space(text, at))
            if head is None:
                raise ValueError("a call needs a name")
            name, at = head["name"].strip(), head.end()
            types = parameter_types(tools, name)
            arguments: dict[str, Any] = {}
            while argument := self.argument.match(text, after_space(text, at)):
                key = argument["key"].strip()
                if not key or key in arguments:
                    raise ValueError(f"argument {key!r} is empty or occurs twice")
                arguments[key] = self._value(argument, types(key))
                at = argument.end()
            calls.append((name, as_json(arguments)))
            if self.tail:
                at = expect(text, at, self.tail)
        return calls, expect(text, at, self.close)

    def _value(self, argument: re.Match[str], types: list[str]) -> Any:
        string = argument.groupdict().get("string")
        if string == "true":
            return argument["value"]
        return typed_value(argument["value"], ["json"] if string == "false" else types)


FUNCTION_ELEMENTS = ElementForm(
    marks=("<tool_call>",),
    close="</tool_call>",
    head=re.compile(r"<function=(?P<name>[^<>\n]+)>"),
    argument=re.compile(r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL),
    tail="</function>",
)
KEY_VALUE_ELEMENTS = ElementForm(
    marks=("<tool_call>",),
    close="</tool_call>",
    head=re.compile(r"(?P<name>[^<>\n{]+)"),
    argument=re.compile(
        r"<arg_key>(?P<key>[^<>]*)</arg_key>\s*<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>", re.DOTALL
    ),
    tail="",
)


def invoke_elements(prefix: str, section: str) -> ElementForm:
    """Return the form `<PREFIXinvoke name="NAME"><PREFIXparameter name="KEY">VALUE</PREFIXparameter></PREFIXinvoke>` in
    a section of this name."""
    start = re.escape(prefix)
    head = re.compile(rf'<{start}invoke name="(?P<name>[^"<>]+)">')
    argument = re.compile(
        rf'<{start}parameter name="(?P<key>[^"<>]+)"(?: string="(?P<string>true|false)")?>'
        rf"(?P<value>(?:(?!<{start}(?:parameter|invoke) name=).)*?)</{start}parameter>",
        re.DOTALL,
    )
    marks, close, tail = (f"<{section}>",), f"</{section}>", f"</{prefix}invoke>"
    return ElementForm(marks, close, head, argument, tail, section=True)


def typed_value(text: str, types: list[str]) -> Any:
    """Return a value of one of these types (JSON schema's names; "json" for any but a plain text) as the text means it;
    the text itself if it is of none of them. A parameter without a type is read as JSON if it is JSON."""
    if not types:
        types = ["json"]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _spelled(text.strip())
    if isinstance(value, float) and not math.isfinite(value):
        return text
    kinds = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "json": True,
    }
    if any(kinds.get(kind, False) for kind in types) and value is not _NO_VALUE:
        return value
    return text


_NO_VALUE = object()


def _spelled(text: str) -> Any:
    """Return a constant in Python's spelling, as templates without `tojson` write it."""
    return CONSTANTS.get(text, _NO_VALUE)


MOST_SCHEMAS = 1000
"""Maximum number of schemas that are read for the types of a parameter: those of other people refer to themselves."""


def parameter_types(tools: Tools, name: str) -> Callable[[str], list[str]]:
    """Return a function from a parameter of this tool to the types that its schema allows; none if it does not say."""
    root = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None)
    properties = _mapping(_mapping(root).get("properties"))
    return lambda key: _types(properties.get(key), root)


def _types(schema: Any, root: Any) -> list[str]:
    """Return the types that a schema allows, also by references (`#/$defs/...`) within `root`. What is no JSON schema
    says nothing."""
    types: list[str] = []
    schemas = [schema]
    for part in itertools.islice(iter(schemas), MOST_SCHEMAS):
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        types += [name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)]
        values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
        types += [_TYPE_NAMES.get(type(value), "string") for value in values]
        for key in ("anyOf", "oneOf", "allOf"):
            schemas += part[key] if isinstance(part.get(key), list) else []
        if "$ref" in part:
            schemas.append(_referenced(part["$ref"], root))
    return types


def _referenced(reference: Any, root: Any) -> Any:
    """Return the part of a schema to which a JSON pointer (RFC 6901) refers; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for key in unquote(reference).split("/")[1:]:
        root = _mapping(root).get(key.replace("~1", "/").replace("~0", "~"))
    return root


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


_TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
