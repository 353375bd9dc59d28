"""Byte-level tokenizers that also list decoders of SentencePiece.

A byte-level tokenizer that was converted from GGUF (SmolLM2 from a package) lists them in its `tokenizer.json`. They
change nothing in a byte-level vocabulary, but llguidance, which takes the bytes of tokens from this file, then reads
its tokens as SentencePiece's, and its masks would exclude most tokens of other bytes than ASCII, the line break among
them. So exports and servers that enforce grammars get the file without them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_SENTENCE_PIECE = ("ByteFallback", "Fuse", "Replace")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def byte_level_tokenizer(folder: Path) -> str | None:
    """Return the text of a folder's `tokenizer.json` without decoders of SentencePiece that have no effect; None if
    there is no such file, or no such decoder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    decoder = byte_level_decoder(tokenizer)
    return None if decoder is None else json.dumps({**tokenizer, "decoder": decoder}, ensure_ascii=False)


def byte_level_decoder(tokenizer: dict[str, Any]) -> dict[str, Any] | None:
    """Return the byte-level decoder of a `tokenizer.json` that also lists decoders of SentencePiece without effect;
    None for any other."""
    decoder = tokenizer.get("decoder") or {}
    parts = {part.get("type"): part for part in decoder.get("decoders", [])}
    if "ByteLevel" not in parts or not parts.keys() <= {"ByteLevel", *_SENTENCE_PIECE} or len(parts) == 1:
        return None
    replaced = (parts.get("Replace") or {}).get("pattern", {}).get("String", "▁")
    vocabulary = [*((tokenizer.get("model") or {}).get("vocab") or {})]
    vocabulary += [token.get("content", "") for token in tokenizer.get("added_tokens") or []]
    used = any(_BYTE.fullmatch(token) or replaced in token for token in vocabulary)
    return None if used else parts["ByteLevel"]
