"""Checks of an example against the tokenizer and the chat template of the model that trains on it.

Most examples need one rendering of the template, because a text has at most as many tokens as bytes. Only an example
near the limit is tokenized exactly as in training.
"""

from __future__ import annotations

from typing import Any

from components.data.examples import Candidate, RowProblem
from components.errors import PromptRefused
from components.trajectories.chat import ChatFormat
from components.trajectories.convert import to_openai

_PROBE = "Zażółć 漢字 😀 \u0001\t\n\u2028 ∑ \U0001f9ff"
"""Text that only a tokenizer with all bytes in its vocabulary preserves."""
_CERTAIN = 0.9
"""Share of the maximum length up to which the length of the rendered text decides."""


class TokenChecks:
    """Checks whether a model can train on a conversation."""

    def __init__(self, chat: ChatFormat, max_length: int):
        self._chat = chat
        self._max_length = max_length
        self._lossless = self._preserved(_PROBE)

    def check(self, candidate: Candidate, tools: list[dict[str, Any]]) -> None:
        """Raise RowProblem if the template or the tokenizer cannot express a history, or if it is too long."""
        for history in candidate.histories:
            messages = [to_openai(message) for message in history.messages]
            try:
                text = self._chat.render(messages, tools, generate=False)
                size = len(text.encode(errors="surrogatepass"))
                if size >= self._max_length or not self._lossless:
                    tokens = len(self._chat.encode(text))
                    if tokens > _CERTAIN * self._max_length:
                        streams = self._chat.streams(messages, tools)
                        tokens = max((len(stream.token_ids) for stream in streams), default=0)
                    if tokens > self._max_length:
                        raise RowProblem(f"{tokens} tokens; model.max_length is {self._max_length}", "too_long")
            except PromptRefused as error:
                raise RowProblem(str(error)[:300], "tokenizer") from None
            for number, message in enumerate(history.messages):
                self._check_text(number, message.role, message.content)

    def _check_text(self, number: int, role: str, text: str) -> None:
        if role == "assistant" and (token := self._chat.special_token(text)) is not None:
            raise RowProblem(f"message {number} contains the special token {token}", "tokenizer")
        if not self._lossless and not self._preserved(text):
            raise RowProblem(f"message {number} has characters that the tokenizer cannot hold", "tokenizer")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RowProblem(f"message {number} is not valid Unicode", "tokenizer") from None

    def _preserved(self, text: str) -> bool:
        """Return True if the tokenizer gives the text back, apart from space at its ends."""
        tokenizer = self._chat.tokenizer
        try:
            ids = self._chat.encode(text)
        except PromptRefused:
            return False
        return tokenizer.decode(ids, skip_special_tokens=False).strip() == text.strip()
