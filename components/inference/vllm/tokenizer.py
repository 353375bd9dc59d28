"""The tokenizer of a started server, as llguidance reads it (`components.models.byte_level`)."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from components.models.byte_level import byte_level_tokenizer

_COPIED = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "config.json")


def readable_tokenizer(base_dir: Path, out: Path) -> Path | None:
    """Write the tokenizer of `base_dir` without unused decoders to the folder `out`, and return it; None if
    llguidance reads the model's own."""
    text = byte_level_tokenizer(base_dir)
    if text is None:
        return None
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        for name in _COPIED:
            if (base_dir / name).is_file():
                shutil.copy(base_dir / name, folder / name)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        out.mkdir(exist_ok=True)
        for file in folder.iterdir():
            os.replace(file, out / file.name)
    return out
