"""The first tagged call of a response while it is sampled: its name, and its arguments as the finished call has them.

A finished call has the arguments as `json.dumps` writes them, whatever spelling the model chose
(`components.trajectories.tool_calls.read_tagged`). So each token of the JSON text is written that way as soon as later
text cannot change it: characters of a string at once, a number when it has ended.

Until the response ends, no call is certain: a call that is cut or invalid, also a later one, makes all of the response
text. Therefore the last brace of the arguments is held back, and with it every later call: as long as the response is
not complete, no client has arguments that it could execute.
"""

from __future__ import annotations

import json
import re

from components.inference.protocol import CallDelta
from components.trajectories.tool_calls import OPEN, call_id

_HEAD = re.compile(
    r"""\s*\{[ \t\n\r]*"name"[ \t\n\r]*:[ \t\n\r]*("(?:[^"\\]|\\.)*")[ \t\n\r]*,"""
    r"""[ \t\n\r]*"arguments"[ \t\n\r]*:[ \t\n\r]*(?=\{)"""
)
"""A call up to its arguments. A call with other keys, or in another order, is not reported."""
_SPACE = re.compile(r"[ \t\n\r]*")
_CHARACTERS = re.compile(
    r"""(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"""
    r"""|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"""
)
"""Whole characters of a string, also as escapes."""
_WORD = re.compile(r"""[^\s,:"\[\]{}]+""")
"""A number or a constant."""
_WRITTEN = {",": ", ", ":": ": "}


class GrowingCall:
    """The first call of a growing response. turn: part of its id."""

    def __init__(self, turn: int):
        self._id = call_id(turn, 0)
        self._name: str | None = None
        self._arguments = GrowingObject()

    def extend(self, text: str) -> CallDelta | None:
        """Return the part of the call that is certain in the response's text so far and was not before."""
        opened = self._name is not None
        if self._name is None:
            start = text.find(OPEN)
            head = _HEAD.match(text, start + len(OPEN)) if start >= 0 else None
            if head is None:
                return None
            try:
                self._name = str(json.loads(head[1]))
            except ValueError:
                return None
            self._arguments.at = head.end()
        new = self._arguments.extend(text)
        return CallDelta(self._id, self._name, new) if new or not opened else None


class GrowingObject:
    """A JSON object in a growing text, as `json.dumps(..., ensure_ascii=False)` writes it, without its last brace."""

    def __init__(self) -> None:
        self.at = 0
        """Place in the text up to which it is written."""
        self._depth = 0
        self._in_string = False
        self._ended = False
        """True after the object, or at text that is no JSON."""

    def extend(self, text: str) -> str:
        """Return what is certain in the text so far and was not before."""
        written: list[str] = []
        while not self._ended and (token := self._token(text)) is not None:
            written.append(token)
        return "".join(written)

    def _token(self, text: str) -> str | None:
        """Return the next token, or the next part of a string; None if it is not certain yet."""
        if self._in_string:
            return self._part_of_string(text)
        space = _SPACE.match(text, self.at)
        self.at = space.end() if space else self.at
        mark = text[self.at : self.at + 1]
        if mark and mark in '{}[]:,"':
            self.at += 1
            self._depth += (mark in "{[") - (mark in "}]")
            self._in_string = mark == '"'
            self._ended = not self._depth
            return None if self._ended else _WRITTEN.get(mark, mark)
        word = _WORD.match(text, self.at)
        if word is None or word.end() == len(text):
            return None
        self.at = word.end()
        try:
            return json.dumps(json.loads(word[0]), allow_nan=False)
        except ValueError:
            self._ended = True
            return None

    def _part_of_string(self, text: str) -> str | None:
        characters = _CHARACTERS.match(text, self.at)
        if characters is not None:
            self.at = characters.end()
            return json.dumps(json.loads(f'"{characters[0]}"'), ensure_ascii=False)[1:-1]
        if not text.startswith('"', self.at):
            return None
        self.at += 1
        self._in_string = False
        return '"'
