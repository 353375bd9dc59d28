"""Log-probabilities of sampled tokens in OpenAI's JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from components.inference.protocol import TokenLogprobs
from components.inference.text_prompts import INCOMPLETE
from components.inference.token_bytes import TokenDecoder

Decode = Callable[[list[int]], str]
"""Token ids to text."""


class SampledTokens(Protocol):
    """Sampled tokens of a response, or of a part of it."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def logprobs(self) -> list[float]: ...

    @property
    def likeliest(self) -> list[TokenLogprobs]: ...


def logprobs_of(answer: SampledTokens, decode: Decode | None) -> list[dict[str, Any]]:
    """Return text, log-probability and bytes of each sampled token, and of the most likely ones in its place."""
    alternatives = answer.likeliest or [[]] * len(answer.token_ids)
    return [
        {
            **_entry(token_id, logprob, decode),
            "top_logprobs": [_entry(other, value, decode) for other, value in likely],
        }
        for token_id, logprob, likely in zip(answer.token_ids, answer.logprobs, alternatives, strict=True)
    ]


def _entry(token_id: int, logprob: float, decode: Decode | None) -> dict[str, Any]:
    text = decode([token_id]) if decode else f"token_id:{token_id}"  # vLLM's format without text
    raw = text.encode() if decode is not None else None
    if INCOMPLETE in text:  # a token may be part of a character
        raw = decode.bytes_of(token_id) if isinstance(decode, TokenDecoder) else None
    return {"token": text, "logprob": logprob, "bytes": None if raw is None else list(raw)}
