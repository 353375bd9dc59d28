"""Saving of a model to a folder, by the process that holds its lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save(model: Any, out: Path) -> None:
    """Write config and safetensors of a transformers model from the calling process. In distributed training, plain
    `save_pretrained` silently writes on rank 0 only."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(out)
    del model.should_save_on_this_rank
