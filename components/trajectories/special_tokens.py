"""Special tokens of a tokenizer in texts: escaped in what others write, refused in what a model is trained to write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any


class SpecialTokens:
    """The special tokens of a tokenizer, such as `<|im_end|>`."""

    def __init__(self, tokenizer: Any):
        tokens = {
            *tokenizer.all_special_tokens,
            *(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special),
        } - {""}
        self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")

    def first(self, text: str) -> str | None:
        """Return the first special token in a text; None without one."""
        match = self._pattern.search(text)
        return match[0] if match else None

    def all(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the special tokens in a text."""
        yield from self._pattern.finditer(text)

    def escape(self, data: Any) -> Any:
        """Return JSON data with escaped special tokens: `<|im_end|>` on a web page becomes `< |im_end|>`."""
        match data:
            case str():
                return self._pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", data)
            case list():
                return [self.escape(item) for item in data]
            case dict():
                return {self.escape(key): self.escape(item) for key, item in data.items()}
        return data
