"""The pythonic form of tool calls, `[find_order(order="K482"), check(from="Bern")]`, half the tokens of JSON.

It is the form of models whose chat template has none. Names and keys may contain dots and dashes and may be reserved
words of Python; other keys are written `**{"any key": 1}`. Values are JSON values in Python's or JSON's spelling; a
tuple is a list. Parsing never evaluates code. Arguments are returned as strict JSON text: without NaN and lone
surrogates.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, NoReturn

from components.trajectories.call_forms.marked import Calls, Tools, after_space, as_json

_LINE = re.compile(r"\n\[(?=\s*+[\w.-]++\s*+\()")
"""Start of a line that may be a list of calls."""
_CALL_LINE = re.compile(r"^[^\S\n]*+\[\s*+([\w.-]++)\s*+\(", re.MULTILINE)
"""Start of a line that is meant as a list of calls."""
_LIST_START = re.compile(r"\[\s*+(?:[\w.-]++\s*+(?:\(|\Z)|\Z)")
"""Start of a list of calls, whole or cut off by the end of the text."""
_POSSIBLE_LINE = re.compile(rf"\n(?:\Z|{_LIST_START.pattern})")
"""Start of a line that may be, or become, a list of calls."""
MOST_STARTS = 20
"""Maximum number of lines of a text that are tried as the list of calls."""
WORD = re.compile(r"[\w.-]+")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""'  r"|'''(?:[^\\]|\\.)*?'''"  r'|"(?:[^"\\]|\\.)*"'  r"|'(?:[^'\\]|\\.)*'", re.DOTALL
)  # fmt: skip
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00[0-9a-fA-F]{6}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


def read_pythonic(text: str) -> tuple[str, Calls]:
    """Return (text before the list of calls, calls). The list starts at the beginning of a line and ends the text.

    Raises ValueError if there is no such list.
    """
    stripped = text.strip()
    if stripped.startswith("["):
        return "", _Reader(stripped).calls()
    space = text[: len(text) - len(text.lstrip())]
    for match in itertools.islice(_LINE.finditer(stripped), MOST_STARTS):
        try:
            return space + stripped[: match.start()], _Reader(stripped[match.start() + 1 :]).calls()
        except ValueError:
            continue
    raise ValueError("no list of calls")


def attempts_pythonic(text: str, tools: Tools) -> bool:
    """Return True for an answer that is meant as a call: a line of it begins with a call of an offered tool."""
    names = {tool["function"]["name"] for tool in tools}
    return any(match[1] in names for match in _CALL_LINE.finditer(text))


def certain_text_pythonic(text: str) -> str:
    """Return the part of a growing text with which the text of `read_pythonic`, or the whole text if that raises
    ValueError, begins, however the text goes on."""
    begin = len(text) - len(text.lstrip())
    if begin == len(text):
        return ""
    if text.startswith("[", begin):
        return "" if _LIST_START.match(text, begin) else text
    possible = _POSSIBLE_LINE.search(text, begin)
    return text[: possible.start()] if possible else text


def write_pythonic(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return calls in the pythonic form, the inverse of `read_pythonic` for valid names."""
    written = []
    for name, arguments in calls:
        parts = [
            f"{key}={literal(value)}" if WORD.fullmatch(key) else f"**{{{literal(key)}: {literal(value)}}}"
            for key, value in arguments.items()
        ]
        written.append(f"{name}({', '.join(parts)})")
    return f"[{', '.join(written)}]"


def literal(value: Any) -> str:
    """Return JSON data as a Python literal with double quotes."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


class _Reader:
    """Parser of a text that is a list of calls. Raises ValueError for any other text."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0

    def calls(self) -> Calls:
        self._expect("[")
        calls = []
        while not self._accept("]"):
            name = self._match(WORD) or self._fail()
            self._expect("(")
            calls.append((name, as_json(self._arguments())))
            self._comma_or("]")
        if self.at < len(self.text) or not calls:
            self._fail()
        return calls

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        while not self._accept(")"):
            if self._accept("**"):
                entries = self._value()
                if not isinstance(entries, dict):
                    self._fail()
            else:
                key = self._match(WORD) or self._fail()
                self._expect("=")
                entries = {key: self._value()}
            if entries.keys() & arguments.keys():
                self._fail()
            arguments |= entries
            self._comma_or(")")
        return arguments

    def _value(self) -> Any:
        if text := self._match(_STRING):
            quotes = 3 if len(text) > 5 and text[:3] in ('"' * 3, "'" * 3) else 1
            return _unescape(text[quotes:-quotes])
        if self._accept("["):
            return self._items()
        if self._accept("("):
            return self._tuple()
        if self._accept("{"):
            return self._mapping()
        if number := self._match(_NUMBER):
            return float(number) if set(number) & set(".eE") else int(number)
        word = self._match(WORD)
        return _CONSTANTS[word] if word in _CONSTANTS else self._fail()

    def _items(self) -> list[Any]:
        items = []
        while not self._accept("]"):
            items.append(self._value())
            self._comma_or("]")
        return items

    def _tuple(self) -> Any:
        """Return a tuple as a list, a value in parentheses as itself."""
        items: list[Any] = []
        comma = True
        while not self._accept(")"):
            items.append(self._value())
            comma = self._comma_or(")")
        return items[0] if len(items) == 1 and not comma else items

    def _mapping(self) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not self._accept("}"):
            key = self._value()
            if not isinstance(key, str):
                self._fail()
            self._expect(":")
            mapping[key] = self._value()
            self._comma_or("}")
        return mapping

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        begin = after_space(self.text, self.at)
        match = pattern.match(self.text, begin)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def _accept(self, mark: str) -> bool:
        begin = after_space(self.text, self.at)
        if not self.text.startswith(mark, begin):
            return False
        self.at = begin + len(mark)
        return True

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            self._fail()

    def _comma_or(self, end: str) -> bool:
        """Consume a comma after an item, or check for `end`, which the caller's loop consumes. Return True if there
        was a comma."""
        if self._accept(","):
            return True
        if not self.text.startswith(end, after_space(self.text, self.at)):
            self._fail()
        return False

    def _fail(self) -> NoReturn:
        raise ValueError(f"no list of calls: unexpected text at character {self.at}")


def _unescape(text: str) -> str:
    """Return the value of a Python or JSON string body. A pair of `\\u` surrogates is one character, as in JSON."""

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xuU" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8))
        return _ESCAPED.get(code, code if code in "\\'\"/" else match[0])

    if "\\" not in text:
        return text
    return _ESCAPE.sub(character, text).encode("utf-16", "surrogatepass").decode("utf-16")
