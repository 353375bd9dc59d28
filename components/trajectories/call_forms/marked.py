"""Forms of tool calls that begin with a marker, such as `<tool_call>`: what they share, and those with JSON calls."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from components.trajectories.reasoning import overlap

Calls = list[tuple[str, str]]
"""Name and arguments (JSON text of a mapping) of each call."""
Tools = Sequence[dict[str, Any]]
"""Offered tools, in OpenAI's format. Forms without types read the values by their parameters' schemas."""

CONSTANTS = {"True": True, "False": False, "None": None}
"""Constants in Python's spelling, as templates without `tojson` write them."""

_SPACE = re.compile(r"\s*")


class CallForm(ABC):
    """A way in which models write tool calls in the text of an answer."""

    with_text = True
    """False if an answer with calls has no other text."""

    @abstractmethod
    def read(self, text: str, tools: Tools = ()) -> tuple[str, Calls]:
        """Return (text without its calls, calls). Raises ValueError for a text that begins a call and does not end it,
        or whose call is invalid."""

    def plain(self, text: str) -> str:
        """Return the content of an answer in which nothing is called."""
        return text

    @abstractmethod
    def attempts_call(self, text: str) -> bool:
        """Return True for an answer that is meant as a call: an invalid one if `read` returns no calls."""

    @abstractmethod
    def start(self, text: str) -> int:
        """Return the place of the first call in a text that has calls."""

    @abstractmethod
    def certain_text(self, text: str) -> str:
        """Return the part of a growing text with which the text of `read`, or the whole text if that raises ValueError,
        begins, however the text goes on."""


class MarkedForm(CallForm):
    """Form whose calls follow a marker. White space between text and calls is dropped; that before the text is kept, as
    in a text without calls."""

    marks: tuple[str, ...]
    """Alternatives of the marker."""
    close: str
    """Marker after the calls; empty if they end with their JSON text."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Alternatives of the text with which calls end."""
        return (self.close,) if self.close else ("}", "]")

    @abstractmethod
    def read_calls(self, text: str, at: int, tools: Tools) -> tuple[Calls, int]:
        """Return the calls after a marker that ends at `at`, and the end of their text. Raises ValueError."""

    def read(self, text: str, tools: Tools = ()) -> tuple[str, Calls]:
        calls: Calls = []
        texts: list[str] = []
        at = 0
        while (start := self._next(text, at)) is not None:
            read, end = self.read_calls(text, start[1], tools)
            calls += read
            texts.append(text[at : start[0]])
            at = end
        texts.append(text[at:])
        if not calls:
            return text, calls
        content = "".join(texts).rstrip()
        return (content if texts[0].strip() else content.lstrip()), calls

    def attempts_call(self, text: str) -> bool:
        return self._next(text, 0) is not None

    def start(self, text: str) -> int:
        place = self._next(text, 0)
        return place[0] if place else len(text)

    def ended_calls(self, text: str, tools: Tools = (), at: int = 0) -> tuple[Calls, int]:
        """Return the calls of a growing text from `at` on that have ended, and the place from which on later text can
        add others."""
        calls: Calls = []
        while (start := self._next(text, at)) is not None:
            try:
                read, at = self.read_calls(text, start[1], tools)
            except (ValueError, RecursionError):
                return calls, start[0]
            calls += read
        return calls, max(at, len(text) - max(overlap(text, mark) for mark in self.marks))

    def _next(self, text: str, at: int) -> tuple[int, int] | None:
        """Return start and end of the next marker."""
        places = [(start, start + len(mark)) for mark in self.marks if (start := text.find(mark, at)) >= 0]
        return min(places, default=None)

    def certain_text(self, text: str) -> str:
        """White space at the end, or before the first other text, is undecided: it is kept only in a text without
        calls."""
        place = self._next(text, 0)
        end = place[0] if place else len(text) - max(overlap(text, mark) for mark in self.marks)
        return text[:end].rstrip()


@dataclass(frozen=True)
class JSONForm(MarkedForm):
    """A JSON object with name and arguments between markers, such as `<tool_call>{...}</tool_call>`, or a list of such
    objects, such as `[TOOL_CALLS][{...}]`."""

    marks: tuple[str, ...]
    close: str
    """Marker after the call; empty if there is none."""
    listed: bool = False
    """True for a list of calls."""
    name: str = "name"
    arguments: str = "arguments"

    def read_calls(self, text: str, at: int, tools: Tools) -> tuple[Calls, int]:
        data, end = read_json(text, at)
        if self.close:
            end = expect(text, end, self.close)
        if isinstance(data, list) is not self.listed or not data:
            raise ValueError(f"expected {'a list of calls' if self.listed else 'a call'}")
        return [self._call(item) for item in (data if self.listed else [data])], end

    def _call(self, call: Any) -> tuple[str, str]:
        if not isinstance(call, dict) or not isinstance(call.get(self.name), str):
            raise ValueError("a call needs a name")
        if self.arguments not in call and len(call) > 1:
            raise ValueError("a call with other keys than its name needs arguments")
        return call[self.name], as_json(call.get(self.arguments, {}))


@dataclass(frozen=True)
class SectionForm(MarkedForm):
    """A section of calls that each consist of a head with the name, JSON arguments and an end, as in DeepSeek V3 and
    Kimi K2."""

    marks: tuple[str, ...]
    close: str
    """Marker after the last call."""
    head: re.Pattern[str]
    """Start of a call, with the group `name`, before its arguments."""
    tail: re.Pattern[str]
    """End of a call, after its arguments."""

    def read_calls(self, text: str, at: int, tools: Tools) -> tuple[Calls, int]:
        calls: Calls = []
        while not text.startswith(self.close, at := after_space(text, at)):
            head = self.head.match(text, at)
            if head is None:
                raise ValueError(f"expected a call or {self.close}")
            arguments, at = read_json(text, head.end())
            tail = self.tail.match(text, at)
            if tail is None:
                raise ValueError("a call is not ended")
            calls.append((head["name"], as_json(arguments)))
            at = tail.end()
        if not calls:
            raise ValueError("a section without calls")
        return calls, at + len(self.close)


def read_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at `at`, after white space, and its end. Raises ValueError."""
    return json.JSONDecoder(parse_constant=no_number).raw_decode(text, after_space(text, at))


def as_json(arguments: Any) -> str:
    """Return arguments as strict JSON text: without NaN and lone surrogates. Raises ValueError if they are no
    mapping."""
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are a mapping")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # lone surrogates raise UnicodeEncodeError, a ValueError
    return text


def expect(text: str, at: int, mark: str) -> int:
    """Return the end of a marker, after white space. Raises ValueError if another text follows."""
    begin = after_space(text, at)
    if not text.startswith(mark, begin):
        raise ValueError(f"a call must end with {mark}")
    return begin + len(mark)


def after_space(text: str, at: int) -> int:
    """Return the position after white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def no_number(constant: str) -> NoReturn:
    """Refuse NaN and infinities (`parse_constant` of the `json` module)."""
    raise ValueError(f"{constant} is no JSON")
