"""What an environment says, as it may be shown to a model: text that can be encoded, without control codes, and not
longer than it may be."""

from __future__ import annotations

import re

from components.environments.protocol import Messages

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Escape sequences of terminals: colours, movements of the cursor, titles (ECMA-48)."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters (category Cc) but for tabs and ends of lines."""
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""They, and halves of surrogate pairs."""


def clean(text: str, most: int) -> tuple[str, bool]:
    """The text without escape sequences and control characters, what is no character replaced; and whether it was cut
    to `most` characters, which it then says at the place."""
    cut = len(text) > most
    length = len(text)
    if cut:
        text = text[:most]
    if _UNFIT.search(text):
        text = _CONTROL.sub("", _ANSI.sub("", text.replace("\r\n", "\n")))
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates: bytes that were no UTF-8
    return (f"{text}\n[cut: {length:,} characters, {most:,} are shown]" if cut else text), cut


def cleaned(messages: Messages, most: int) -> tuple[Messages, int]:
    """The messages with clean contents, and how many were cut."""
    found, count = [], 0
    for message in messages:
        text, cut = clean(message["content"], most)
        count += cut
        found.append(message if text == message["content"] else {**message, "content": text})
    return found, count
