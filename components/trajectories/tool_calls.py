"""Tool calls as text: the two forms in which models write them, read and written.

Tagged: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, for chat templates that have a place for tools.
Pythonic: `[find_order(order="K482"), check(from="Bern")]`, half the tokens. Names and keys may hold dots and dashes and
may be words that Python reserves, as those of tools do; other keys are written `**{"any key": 1}`. Values are JSON's,
in Python's spelling or in JSON's.

Reading never evaluates anything. Text that begins like a call and is none raises ValueError: whoever reads decides
what it is then. Arguments are returned as JSON text that every JSON parser reads: no NaN, no lone surrogates.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, NoReturn

Calls = list[tuple[str, str]]
"""Name and arguments (JSON text of a mapping) of each call."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LINE = re.compile(r"\n\[(?=\s*+[\w.-]++\s*+\()")
"""The beginning of a line that may be a list of calls."""
MOST_STARTS = 20
"""Lines of a text that are tried as the list of calls."""
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[\w.-]+")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00[0-9a-fA-F]{6}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}


def read_tagged(text: str) -> tuple[str, Calls]:
    """(text without its calls, calls). Raises ValueError where a tag is not followed by a call."""
    calls: Calls = []
    rest: list[str] = []
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        begin = _after_space(text, start + len(_OPEN))
        call, end = json.JSONDecoder(parse_constant=_no_number).raw_decode(text, begin)
        end = _after_space(text, end)
        if not text.startswith(_CLOSE, end):
            raise ValueError(f"a call must end with {_CLOSE}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("a call needs a name")
        calls.append((call["name"], _as_json(call.get("arguments", {}))))
        rest.append(text[at:start])
        at = end + len(_CLOSE)
    rest.append(text[at:])
    return ("".join(rest).strip() if calls else text), calls


def read_pythonic(text: str) -> tuple[str, Calls]:
    """(what is said before the list of calls, calls); the list begins the text or a line of it, and ends the text.

    Raises ValueError where there is no such list.
    """
    stripped = text.strip()
    if stripped.startswith("["):
        return "", _Reader(stripped).calls()
    for match in itertools.islice(_LINE.finditer(stripped), MOST_STARTS):
        try:
            return stripped[: match.start()], _Reader(stripped[match.start() + 1 :]).calls()
        except ValueError:
            continue
    raise ValueError("no list of calls")


def write_pythonic(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The inverse of `read_pythonic`, for names that are words."""
    shown = []
    for name, arguments in calls:
        listed = [
            f"{key}={literal(value)}" if _WORD.fullmatch(key) else f"**{{{literal(key)}: {literal(value)}}}"
            for key, value in arguments.items()
        ]
        shown.append(f"{name}({', '.join(listed)})")
    return f"[{', '.join(shown)}]"


def literal(value: Any) -> str:
    """JSON data as Python; text in double quotes."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _as_json(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are a mapping")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate is no text: UnicodeEncodeError, a ValueError
    return text


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


class _Reader:
    """Reads a list of calls from the beginning of a text to its end; raises ValueError where it is none."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0

    def calls(self) -> Calls:
        self._expect("[")
        found = []
        while not self._found("]"):
            name = self._match(_WORD) or self._fail()
            self._expect("(")
            found.append((name, _as_json(self._arguments())))
            self._comma_or("]")
        if self.at < len(self.text) or not found:
            self._fail()
        return found

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        while not self._found(")"):
            if self._found("**"):
                given = self._value()
                if not isinstance(given, dict):
                    self._fail()
            else:
                key = self._match(_WORD) or self._fail()
                self._expect("=")
                given = {key: self._value()}
            if given.keys() & arguments.keys():
                self._fail()
            arguments |= given
            self._comma_or(")")
        return arguments

    def _value(self) -> Any:
        if text := self._match(_STRING):
            return _unescape(text[1:-1])
        if self._found("["):
            return self._items()
        if self._found("{"):
            return self._mapping()
        if number := self._match(_NUMBER):
            return float(number) if set(number) & set(".eE") else int(number)
        word = self._match(_WORD)
        return _CONSTANTS[word] if word in _CONSTANTS else self._fail()

    def _items(self) -> list[Any]:
        items = []
        while not self._found("]"):
            items.append(self._value())
            self._comma_or("]")
        return items

    def _mapping(self) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not self._found("}"):
            key = self._value()
            if not isinstance(key, str):
                self._fail()
            self._expect(":")
            mapping[key] = self._value()
            self._comma_or("}")
        return mapping

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        begin = _after_space(self.text, self.at)
        found = pattern.match(self.text, begin)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def _found(self, mark: str) -> bool:
        begin = _after_space(self.text, self.at)
        if not self.text.startswith(mark, begin):
            return False
        self.at = begin + len(mark)
        return True

    def _expect(self, mark: str) -> None:
        if not self._found(mark):
            self._fail()

    def _comma_or(self, end: str) -> None:
        """After an item: a comma, or the end, which is left for the loop to see."""
        if not self._found(",") and not self.text.startswith(end, _after_space(self.text, self.at)):
            self._fail()

    def _fail(self) -> NoReturn:
        raise ValueError(f"no list of calls: unexpected text at character {self.at}")


def _unescape(text: str) -> str:
    """What the inside of a Python or JSON string says; a pair of `\\u` surrogates is one character, as in JSON."""

    def said(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xuU" and len(code) > 1:
            return chr(int(code[1:], 16))
        return _ESCAPED.get(code, code if code in "\\'\"/" else match[0])

    if "\\" not in text:
        return text
    return _ESCAPE.sub(said, text).encode("utf-16", "surrogatepass").decode("utf-16")
