"""Tokens and their texts: the tokens of a text prompt, the text and the bytes of each token, which grammars match, and
log-probabilities of tokens as OpenAI's JSON shows them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, Protocol

from components.errors import ContextOverflow, PromptRefused
from components.inference.protocol import TokenLogprobs

Decode = Callable[[list[int]], str]
"""Token ids to text."""
INCOMPLETE = "\ufffd"
"""Character that decoders write for bytes that are no character, or not yet."""
BYTES_PER_CHARACTER = 4
"""Maximum length of a character in UTF-8. A token has at least a byte, so a character has at most as many tokens."""
PROBE = "Zwei Fäden, 北京 42 — <b>naïve</b>\n\tdef f(x): return x**2 # 🙂"
"""Text whose tokens must have its bytes."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""Name of a token of a single byte."""


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

    def __init__(self, decode: Decode):
        self._decode = decode
        self._context: list[int] = []
        """Last tokens whose text is complete."""
        self._open: list[int] = []
        """Tokens after them, which end with an incomplete character."""
        self.length = 0
        """Number of complete characters so far."""

    def text_of(self, token: int) -> str:
        """Return the text that `token` would add. A character that it does not complete is the mark INCOMPLETE."""
        before = self._decode(self._context) if self._context else ""
        return self._decode([*self._context, *self._open, token])[len(before) :]

    def append(self, token: int) -> None:
        """Append a token."""
        added = self.text_of(token)
        self._open.append(token)
        if not added.endswith(INCOMPLETE) or len(self._open) >= BYTES_PER_CHARACTER:
            self._context, self._open = self._open, []
            self.length += len(added)


class TokenReader:
    """Bytes of single tokens of a tokenizer. Raises ValueError for a tokenizer whose tokens have unknown bytes."""

    def __init__(self, tokenizer: Any):
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError("it is no fast tokenizer")
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder") or {}
        parts = decoder.get("decoders", [decoder])
        self._bytes = _byte_level if any(part.get("type") == "ByteLevel" for part in parts) else _sentence_piece
        if b"".join(self.read(tokenizer(PROBE, add_special_tokens=False).input_ids)).strip() != PROBE.encode():
            raise ValueError("the bytes of its tokens are unknown")

    def read(self, tokens: list[int]) -> list[bytes]:
        """Return the bytes of each token. A special token has those of its name."""
        return [
            (name or "").encode() if token in self._added or name is None else self._bytes(name)
            for token, name in zip(tokens, self._tokenizer.convert_ids_to_tokens(tokens), strict=True)
        ]


class TokenDecoder:
    """Text of tokens, as a server shows it, and the bytes of each token."""

    def __init__(self, tokenizer: Any):
        self._decode = tokenizer.decode
        try:
            self._reader: TokenReader | None = TokenReader(tokenizer)
        except ValueError:
            self._reader = None

    def __call__(self, tokens: list[int]) -> str:
        return self._decode(tokens)

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if the tokenizer does not determine them."""
        return None if self._reader is None else self._reader.read([token])[0]


def token_bytes(tokenizer: Any, vocabulary: int) -> tuple[list[bytes], list[int]]:
    """Return the bytes of each token, and the tokens that are no text. vocabulary: number of the model's logits. Raises
    as `TokenReader`."""
    special = set(tokenizer.all_special_ids)
    special |= {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    known = TokenReader(tokenizer).read(list(range(min(vocabulary, len(tokenizer)))))
    unused = range(len(known), vocabulary)
    return (
        [*known, *(f"<unused {token}>".encode() for token in unused)],
        sorted({token for token in special if token < vocabulary} | set(unused)),
    )


def _byte_level(name: str) -> bytes:
    """Return the bytes of a token of a byte-level tokenizer (GPT-2), where each character stands for a byte."""
    return b"".join(bytes([_BYTES[character]]) if character in _BYTES else character.encode() for character in name)


def _sentence_piece(name: str) -> bytes:
    """Return the bytes of a SentencePiece token: `▁` is a space, `<0x0A>` a byte."""
    match = BYTE_TOKEN.fullmatch(name)
    return bytes([int(match[1], 16)]) if match else name.replace("▁", " ").encode()


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character, as in GPT-2's encoder: printable ones stand for themselves, the others for
    characters from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()


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
    known = None if math.isnan(logprob) else logprob  # an added token was not sampled
    return {"token": text, "logprob": known, "bytes": None if raw is None else list(raw)}
