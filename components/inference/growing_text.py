"""Text of a response while it is sampled, up to where later tokens can still change it.

The parts that an engine reports are the beginning of the content that the finished response has: put together, they are
a prefix of it, whatever is sampled next. So text is held back that may be the beginning of

- a character: its last bytes are not sampled yet. Decoders write U+FFFD in their place; tokens of single bytes
  (`<0xE2>`) are held back until the next other token, because an invalid byte changes the text of all of them;
- a stop string;
- a tool call, or white space around calls (`components.trajectories.call_forms`). From the first possible call on, the
  text is held back until the response ends, because an invalid call makes all of it text. Tagged calls are reported
  as they are sampled, see below;
- a final response in a template with channels, for which nothing is reported.

A text completion, or a response that calls no tools, has no calls to hold back.

Tagged calls are reported with their names, and arguments as the finished calls have them. A finished call has the
arguments as `json.dumps` writes them, whatever spelling the model chose
(`components.trajectories.call_forms`). So each token of the JSON text is written that way as soon as later
text cannot change it: characters of a string at once, a number when it has ended.

Until the response ends, no call is certain: a call that is cut or invalid, also a later one, makes all of the response
text. Therefore the last brace of the arguments of each call is held back: as long as the response is not complete, no
client has arguments that it could execute.

Calls of the pythonic form are not reported while they grow: their values are Python literals, whose strings, tuples and
`**{...}` would need a parser of their own that writes JSON from an unfinished text.

Stop strings are texts that end a response. Tokens are sampled until the text contains one; the token that completes it
is the last one. The message ends before the stop string, as in OpenAI's API. The sampled tokens stay as they are, and a
conversation that goes on continues from them: nothing after the stop string was sampled, so nothing after it is trained
on, except for further characters of the completing token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from components.inference.protocol import CallDelta, ChatRequest
from components.inference.token_texts import BYTE_TOKEN, BYTES_PER_CHARACTER, INCOMPLETE
from components.trajectories.call_forms import FORMS
from components.trajectories.call_forms.marked import MarkedForm
from components.trajectories.chat import ChatFormat
from components.trajectories.reasoning import ReasoningForm, overlap
from components.trajectories.response_reader import call_id

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Marks of the form `tagged_json`."""
_HEAD = re.compile(
    r"""\s*\{[ \t\n\r]*"name"[ \t\n\r]*:[ \t\n\r]*("(?:[^"\\]|\\.)*")[ \t\n\r]*,"""
    r"""[ \t\n\r]*"arguments"[ \t\n\r]*:[ \t\n\r]*(?=\{)"""
)
"""A call up to its arguments. A call with other keys, or in another order, is not reported."""
_TAIL = re.compile(rf"[ \t\n\r]*\}}\s*{CLOSE}")
"""A call after its arguments."""
_SPACE = re.compile(r"[ \t\n\r]*")
_CHARACTERS = re.compile(
    r"""(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"""
    r"""|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"""
)
"""Whole characters of a string, also as escapes."""
_WORD = re.compile(r"""[^\s,:"\[\]{}]+""")
"""A number or a constant."""
_WRITTEN = {",": ", ", ":": ": "}


class GrowingCalls:
    """The calls of a growing response. turn: part of their ids. start: returns the place in a growing text after its
    reasoning, None while it reasons.

    Calls are reported up to the first one with other keys, or in another order, than `_HEAD` and `_TAIL` have.
    """

    def __init__(self, turn: int, start: Callable[[str], int | None] = lambda _: 0):
        self._turn = turn
        self._start = start
        self._index = 0
        """Place of the call that grows."""
        self._name: str | None = None
        """Its name; None before it is certain."""
        self._arguments = GrowingObject()

    def extend(self, text: str) -> list[CallDelta]:
        """Return the parts of the calls that are certain in the response's text so far and were not before."""
        deltas: list[CallDelta] = []
        while True:
            opened = self._name is not None
            if self._name is None:
                self._name = self._begin(text)
            if self._name is None:
                return deltas
            new = self._arguments.extend(text)
            if new or not opened:
                deltas.append(CallDelta(call_id(self._turn, self._index), self._name, new, self._index))
            end = _TAIL.match(text, self._arguments.at) if self._arguments.closed else None
            if end is None:
                return deltas
            self._index += 1
            self._name, self._arguments = None, GrowingObject(end.end())

    def _begin(self, text: str) -> str | None:
        """Return the name of the next call, and move to its arguments; None if it is not certain yet."""
        answer = self._start(text)
        if answer is None:
            return None
        start = text.find(OPEN, max(self._arguments.at, answer))
        head = _HEAD.match(text, start + len(OPEN)) if start >= 0 else None
        if head is None:
            return None
        try:
            name = str(json.loads(head[1]))
        except ValueError:
            return None
        self._arguments.at = head.end()
        return name


class GrowingObject:
    """A JSON object in a growing text, as `json.dumps(..., ensure_ascii=False)` writes it, without its last brace."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        """Place in the text up to which it is written."""
        self._depth = 0
        self._in_string = False
        self._ended = False
        """True after the object, or at text that is no JSON."""

    @property
    def closed(self) -> bool:
        """True after the object."""
        return self._ended and not self._depth

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


class EndedCalls:
    """The calls of a growing response whose form does not show their arguments as JSON: each is reported when it has
    ended. turn: part of their ids.

    The form reads them only after one of its ends, such as `</tool_call>`, has arrived. An argument may contain it:
    such a call is read again when it has grown by a quarter, so that all readings take linear time.
    """

    def __init__(self, turn: int, chat: ChatFormat, form: MarkedForm, tools: Sequence[dict[str, Any]]):
        self._turn, self._chat, self._form, self._tools = turn, chat, form, tools
        self._at: int | None = None
        """Place after the calls that have ended; None while the response reasons."""
        self._searched = 0
        """Number of characters that are searched for an end."""
        self._ended = False
        """True if an end has arrived since the last reading."""
        self._again = 0
        """Number of characters from which on the calls are read again."""
        self._reported = 0

    def extend(self, text: str) -> list[CallDelta]:
        """Return the calls that have ended, and had not before, without the last brace. text: the whole text so far."""
        if self._at is None:
            self._at = self._chat.answer_start(text)
        if self._at is None:
            return []
        begin, self._searched = self._searched, len(text)
        self._ended |= any(text.find(end, max(begin - len(end) + 1, self._at)) >= 0 for end in self._form.ends)
        if not self._ended or len(text) < self._again:
            return []
        calls, self._at = self._form.ended_calls(text, self._tools, self._at)
        self._ended, self._again = False, len(text) + (len(text) - self._at) // 4
        first, self._reported = self._reported, self._reported + len(calls)
        deltas = [
            CallDelta(call_id(self._turn, index), name, arguments[:-1], index)
            for index, (name, arguments) in enumerate(calls, first)
        ]
        return [delta for delta in deltas if delta.index == 0 or not self._chat.single_call]


class GrowingText:
    """Text of a growing response.

    stop: strings that end it. certain: returns the part of a growing text that later text does not change; None means
    all of it. growing_calls: the calls that are reported as they are sampled. form: marks of its reasoning.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        certain: Callable[[str], str] | None = None,
        growing_calls: GrowingCalls | EndedCalls | None = None,
        form: ReasoningForm | None = None,
    ):
        self._tokenizer = tokenizer
        self._stop = stop
        self._certain = certain
        self._growing_calls = growing_calls
        self._form = form
        self.tokens = 0
        """Number of tokens so far."""
        self.calls: list[CallDelta] = []
        """Parts of calls that the last tokens made certain."""
        self.reasoning = ""
        """Part of the reasoning that the last tokens made certain."""
        self._reasoned = 0
        self._window: list[int] = []
        """Last tokens whose text is known, for the decoder's context, and the tokens after them."""
        self._known = 0
        """Number of characters of the window's text that are known."""
        self._text = ""
        self._reported = 0

    def extend(self, tokens: list[int]) -> str:
        """Add sampled tokens, which do not end the response. Return the text that is now certain and was not
        before."""
        self.tokens += len(tokens)
        self._window += tokens
        self.calls, self.reasoning = [], ""
        if not self._window or not self._decode():
            return ""
        text = before_possible_stop(self._text, self._stop)
        certain = self._certain(text) if self._certain else text
        new = certain[self._reported :]
        self._reported += len(new)
        if self._form:
            self.reasoning = self._form.certain(text)[self._reasoned :]
            self._reasoned += len(self.reasoning)
        if self._growing_calls:
            self.calls = self._growing_calls.extend(text)
        return new

    def _decode(self) -> bool:
        """Add the window's new text, if it ends with a whole character. Return False if it does not."""
        text = str(self._tokenizer.decode(self._window, skip_special_tokens=False))
        if text.endswith(INCOMPLETE) or BYTE_TOKEN.fullmatch(
            str(self._tokenizer.convert_ids_to_tokens(self._window[-1]))
        ):
            return False
        self._text += text[self._known :]
        self._known = len(text)
        last = len(str(self._tokenizer.decode(self._window[-1:], skip_special_tokens=False)))
        if last:  # else its text depends on the tokens before it
            self._window, self._known = self._window[-1:], last
        return True


def growing_message(
    chat: ChatFormat,
    stop: Sequence[str],
    turn: int = 0,
    *,
    calls: bool = True,
    tools: Sequence[dict[str, Any]] = (),
) -> GrowingText:
    """Return the growing text of a message. turn: part of the calls' ids. calls: False if what looks like a call is
    text. tools: the offered ones."""
    if not calls:
        return GrowingText(chat.tokenizer, stop, chat.certain_content, form=chat.reasoning)
    growing_calls: GrowingCalls | EndedCalls | None = None
    if chat.call_form is FORMS["tagged_json"] and not chat.channel:
        growing_calls = GrowingCalls(turn, chat.answer_start)
    elif isinstance(chat.call_form, MarkedForm) and not chat.channel:
        growing_calls = EndedCalls(turn, chat, chat.call_form, tools)
    return GrowingText(chat.tokenizer, stop, chat.certain_text, growing_calls, chat.reasoning)


def growing_response(chat: ChatFormat, request: ChatRequest) -> GrowingText:
    """Return the growing text of the response to a request. chat: for its prompt (`ResponseReader.after`)."""
    turn = sum(message["role"] == "assistant" for message in request.messages)
    return growing_message(chat, request.stop, turn, calls=not request.form.without_calls, tools=request.tools)


def text_before(text: str, stop: Sequence[str]) -> str | None:
    """Return the text before the first stop string; None if it contains none."""
    places = [place for string in stop if (place := text.find(string)) >= 0]
    return text[: min(places)] if places else None


def before_possible_stop(text: str, stop: Sequence[str]) -> str:
    """Return the part of a growing text that is before every stop string, however the text goes on."""
    before = text_before(text, stop)
    if before is not None:
        return before
    return text[: len(text) - max((overlap(text, string) for string in stop), default=0)]


class StopDetector:
    """Detector of stop strings in a growing response. decode: conversion of token ids to text."""

    def __init__(self, stop: Sequence[str], decode: Callable[[list[int]], str]):
        self._stop = stop
        self._decode = decode
        self._window = 1 + BYTES_PER_CHARACTER * max(map(len, stop))
        """Number of last tokens that contain a stop string completed by the last token, and one token before it."""

    def reached(self, sampled: list[int]) -> bool:
        """Return True if the last tokens contain a stop string. To be called after each token."""
        return text_before(self._decode(sampled[-self._window :]), self._stop) is not None
