"""Tokens that continue a response of a grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from components.inference.grammar_compiler import error_of


class Matcher:
    """Allowed tokens of one response as it grows. grammar: its Lark grammar."""

    def __init__(self, matcher: Any, grammar: str, vocabulary: int, special: Sequence[int], stop_ids: Collection[int]):
        self._matcher = matcher
        self.grammar = grammar
        self._vocabulary = vocabulary
        self._special = sorted({token for token in special if token < vocabulary})
        self._stops = sorted(token for token in stop_ids if token < vocabulary)

    def allowed(self) -> Any:
        """Return a (V,) mask, True for tokens that may come next. Raises ValueError if the grammar is too complex."""
        import numpy as np

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if reason := error_of(self._matcher):
            raise ValueError(reason)
        allowed_V = np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool)
        allowed_V[self._special] = False  # never as text
        allowed_V[self._stops] = self._matcher.is_accepting()
        if not allowed_V.any():
            raise ValueError("no token of the model continues the response")
        return allowed_V

    def append(self, token: int) -> None:
        """Append a sampled token, which is an allowed one."""
        self._matcher.consume_token(token)

    def accepts(self, tokens: list[int], *, ended: bool) -> bool:
        """Append tokens, and return True if all of them are allowed. ended: the response must be complete after
        them."""
        if not set(tokens).isdisjoint([*self._special, *self._stops]):
            return False
        return self._matcher.try_consume_tokens(tokens) == len(tokens) and (not ended or self._matcher.is_accepting())
