"""The bytes of each token of a tokenizer, which grammars match and log-probabilities show."""

from __future__ import annotations

import json
import re
from typing import Any

PROBE = "Zwei Fäden, 北京 42 — <b>naïve</b>\n\tdef f(x): return x**2 # 🙂"
"""Text whose tokens must have its bytes."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


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


class TokenBytes:
    """A tokenizer as llguidance reads it. vocabulary: number of the model's logits. Raises ValueError for a tokenizer
    whose tokens have unknown bytes."""

    def __init__(self, tokenizer: Any, vocabulary: int):
        reader = TokenReader(tokenizer)
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = set(tokenizer.all_special_ids) | {token for token, entry in added.items() if entry.special}
        self.tokens = reader.read(list(range(min(vocabulary, len(tokenizer)))))
        unused = range(len(self.tokens), vocabulary)
        self.tokens += [f"<unused {token}>".encode() for token in unused]
        self.special_token_ids = sorted({token for token in special if token < vocabulary} | set(unused))
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        if not isinstance(text, str):
            raise TypeError("expected a text")
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def _byte_level(name: str) -> bytes:
    """Return the bytes of a token of a byte-level tokenizer (GPT-2), where each character stands for a byte."""
    return b"".join(bytes([_BYTES[character]]) if character in _BYTES else character.encode() for character in name)


def _sentence_piece(name: str) -> bytes:
    """Return the bytes of a SentencePiece token: `▁` is a space, `<0x0A>` a byte."""
    match = _BYTE.fullmatch(name)
    return bytes([int(match[1], 16)]) if match else name.replace("▁", " ").encode()


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character, as in GPT-2's encoder: printable ones stand for themselves, the others for
    characters from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()
