"""Tokens of a text prompt, and the text of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from components.errors import ContextOverflow, PromptRefused
from components.inference.stop_strings import BYTES_PER_CHARACTER

INCOMPLETE = "\ufffd"
"""Character that decoders put in place of an incomplete one."""


def text_prompt(tokenizer: Any, prompt: str | list[int], most_characters: int) -> list[int]:
    """Return the tokens of a prompt. most_characters: maximum length of a text. Raises ContextOverflow for a longer
    one, PromptRefused for invalid Unicode."""
    if isinstance(prompt, list):
        return list(prompt)
    if len(prompt) > most_characters:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} characters; this model's longest prompt has {most_characters} at most"
        )
    try:
        return list(tokenizer(prompt).input_ids)
    except TypeError as error:
        raise PromptRefused(f"this text is not valid Unicode and cannot be tokenized: {prompt[:200]!r}") from error


def added_tokens(tokenizer: Any, prompt: str | list[int], tokens: list[int]) -> int:
    """Return the number of leading tokens that the tokenizer added to a text."""
    if isinstance(prompt, list):
        return 0
    plain = tokenizer(prompt, add_special_tokens=False).input_ids
    return next((count for count in range(len(tokens)) if tokens[count : count + len(plain)] == plain), 0)


class TokenTexts:
    """Text of each token of a sequence, after those before it: the decoders of some tokenizers drop the leading space
    of a token alone."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._context: list[int] = []
        """Last tokens whose text is complete."""
        self._open: list[int] = []
        """Tokens after them, which end with an incomplete character."""
        self.length = 0
        """Number of complete characters so far."""

    def text_of(self, token: int) -> str:
        """Return the text that `token` would add. A character that it does not complete is the mark INCOMPLETE."""
        return self._added([*self._open, token])

    def append(self, token: int) -> None:
        """Append a token."""
        added = self.text_of(token)
        self._open.append(token)
        if not added.endswith(INCOMPLETE) or len(self._open) >= BYTES_PER_CHARACTER:
            self._context, self._open = self._open, []
            self.length += len(added)

    def _added(self, tokens: list[int]) -> str:
        before = self._decode(self._context) if self._context else ""
        return self._decode([*self._context, *tokens])[len(before) :]
