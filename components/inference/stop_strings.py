"""Stop strings: texts that end a response.

Tokens are sampled until the text contains a stop string; the token that completes it is the last one. The message ends
before the stop string, as in OpenAI's API. The sampled tokens stay as they are, and a conversation that goes on
continues from them: nothing after the stop string was sampled, so nothing after it is trained on, except for further
characters of the completing token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from components.trajectories.tool_calls import overlap

BYTES_PER_CHARACTER = 4
"""Maximum length of a character in UTF-8. A token has at least a byte, so a character has at most as many tokens."""


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
