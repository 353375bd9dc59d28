"""A model as a folder, written by whichever process has the lock for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save(model: Any, out: Path) -> None:
    """Writes config and safetensors of a transformers model, as its `save_pretrained` does: which, in processes that
    train together, writes nothing and says nothing in any but the first."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(out)
    del model.should_save_on_this_rank
