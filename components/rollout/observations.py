"""Sanitization of environment messages for a model: encodable text of bounded length, without control codes and
without the special tokens by which chat templates mark roles.

`components.trajectories.chat` escapes the special tokens of a known tokenizer. This module covers tokenizers that are
not known, such as a server's, and episodes that another model trains on.
"""

from __future__ import annotations

import re

from components.environments.protocol import Messages

_ANSI = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b(?:\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Terminal escape sequences: colors, cursor movement, titles (ECMA-48)."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters (category Cc) except tabs and line feeds."""
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and lone surrogates."""
_MARKS = re.compile(
    r"<[|｜][\w▁]{1,40}[|｜]>|<(?:start|end)_of_turn>|\[/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|TOOL_RESULTS)\]|</?s>"
)
"""Special tokens of common model families."""


def clean(text: str, most: int) -> tuple[str, bool]:
    """Return the sanitized text, and True if it was truncated to `most` characters (marked at its end). Escape
    sequences and control characters are removed, lone surrogates are replaced, and special tokens such as `<|im_end|>`
    become the plain text `< |im_end|>`."""
    cut = len(text) > most
    length = len(text)
    if cut:
        text = text[:most]
    if _UNFIT.search(text):
        text = _CONTROL.sub("", _ANSI.sub("", text.replace("\r\n", "\n")))
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates: bytes that were not valid UTF-8
    text = _MARKS.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
    return (f"{text}\n[cut: {length:,} characters, {most:,} are shown]" if cut else text), cut


def cleaned(messages: Messages, most: int) -> tuple[Messages, int]:
    """Return the messages with sanitized contents, and the number of truncated messages."""
    clean_messages, count = [], 0
    for message in messages:
        text, cut = clean(message["content"], most)
        count += cut
        clean_messages.append(message if text == message["content"] else {**message, "content": text})
    return clean_messages, count
