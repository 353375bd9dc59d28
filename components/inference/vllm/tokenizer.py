"""The tokenizer of a started server, as llguidance reads it.

llguidance takes the bytes of tokens from `tokenizer.json`. A byte-level tokenizer that was converted from GGUF (SmolLM2
from a package) also lists the decoders of SentencePiece; llguidance then reads its tokens as SentencePiece's, and its
masks would exclude most tokens of other bytes than ASCII, the line break among them. These decoders change nothing in
a byte-level vocabulary, so the server receives a copy of the tokenizer without them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

_SENTENCE_PIECE = ("ByteFallback", "Fuse", "Replace")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_COPIED = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "config.json")


def readable_tokenizer(base_dir: Path, out: Path) -> Path | None:
    """Write the tokenizer of `base_dir` without unused decoders to the folder `out`, and return it; None if
    llguidance reads the model's own."""
    path = base_dir / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = json.loads(path.read_text())
    decoder = byte_level_decoder(tokenizer)
    if decoder is None:
        return None
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        for name in _COPIED:
            if (base_dir / name).is_file():
                shutil.copy(base_dir / name, folder / name)
        (folder / path.name).write_text(json.dumps({**tokenizer, "decoder": decoder}))
        out.mkdir(exist_ok=True)
        for file in folder.iterdir():
            os.replace(file, out / file.name)
    return out


def byte_level_decoder(tokenizer: dict[str, Any]) -> dict[str, Any] | None:
    """Return the byte-level decoder of a `tokenizer.json` that also lists decoders of SentencePiece without effect;
    None for any other."""
    decoder = tokenizer.get("decoder") or {}
    parts = {part.get("type"): part for part in decoder.get("decoders", [])}
    if "ByteLevel" not in parts or not parts.keys() <= {"ByteLevel", *_SENTENCE_PIECE} or len(parts) == 1:
        return None
    replaced = (parts.get("Replace") or {}).get("pattern", {}).get("String", "▁")
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    used = any(_BYTE.fullmatch(token) or replaced in token for token in vocabulary)
    return None if used else parts["ByteLevel"]
