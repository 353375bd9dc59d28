"""Text of a response while it is sampled, up to where later tokens can still change it.

The parts that an engine reports are the beginning of the content that the finished response has: put together, they are
a prefix of it, whatever is sampled next. So text is held back that may be the beginning of

- a character: its last bytes are not sampled yet. Decoders write U+FFFD in their place; tokens of single bytes
  (`<0xE2>`) are held back until the next other token, because an invalid byte changes the text of all of them;
- a stop string (`components.inference.stop_strings`);
- a tool call, or white space around calls (`components.trajectories.tool_calls`). From the first possible call on, the
  text is held back until the response ends, because an invalid call makes all of it text. Tagged calls are reported
  as they are sampled (`components.inference.growing_call`);
- a final response in a template with channels, for which nothing is reported.

A text completion, or a response that calls no tools, has no calls to hold back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from components.inference.growing_call import GrowingCalls
from components.inference.protocol import CallDelta, ChatRequest
from components.inference.stop_strings import before_possible_stop
from components.trajectories.chat import ChatFormat

INCOMPLETE = "\ufffd"
"""Character that decoders write for bytes that are no character, or not yet."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class GrowingText:
    """Text of a growing response.

    stop: strings that end it. certain: returns the part of a growing text that later text does not change; None means
    all of it. growing_calls: the calls that are reported as they are sampled.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        certain: Callable[[str], str] | None = None,
        growing_calls: GrowingCalls | None = None,
    ):
        self._tokenizer = tokenizer
        self._stop = stop
        self._certain = certain
        self._growing_calls = growing_calls
        self.tokens = 0
        """Number of tokens so far."""
        self.calls: list[CallDelta] = []
        """Parts of calls that the last tokens made certain."""
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
        self.calls = []
        if not self._window or not self._decode():
            return ""
        text = before_possible_stop(self._text, self._stop)
        certain = self._certain(text) if self._certain else text
        new = certain[self._reported :]
        self._reported += len(new)
        if self._growing_calls:
            self.calls = self._growing_calls.extend(text)
        return new

    def _decode(self) -> bool:
        """Add the window's new text, if it ends with a whole character. Return False if it does not."""
        text = str(self._tokenizer.decode(self._window, skip_special_tokens=False))
        if text.endswith(INCOMPLETE) or _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(self._window[-1]))):
            return False
        self._text += text[self._known :]
        self._known = len(text)
        last = len(str(self._tokenizer.decode(self._window[-1:], skip_special_tokens=False)))
        if last:  # else its text depends on the tokens before it
            self._window, self._known = self._window[-1:], last
        return True


def growing_message(chat: ChatFormat, stop: Sequence[str], turn: int = 0, *, calls: bool = True) -> GrowingText:
    """Return the growing text of a message. turn: part of the calls' ids. calls: False if what looks like a call is
    text."""
    if not calls and not chat.channel:
        return GrowingText(chat.tokenizer, stop)
    tagged = calls and chat.native_tools and not chat.channel
    return GrowingText(chat.tokenizer, stop, chat.certain_text, GrowingCalls(turn) if tagged else None)


def growing_response(chat: ChatFormat, request: ChatRequest) -> GrowingText:
    """Return the growing text of the response to a request."""
    turn = sum(message["role"] == "assistant" for message in request.messages)
    return growing_message(chat, request.stop, turn, calls=not request.form.without_calls)
