"""Specs of data of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from components.errors import Problem
from components.specs import Spec

Format = Literal["auto", "jsonl", "json", "parquet", "csv", "arrow"]


class SourceSpec(Spec):
    """Source of rows: files, or a dataset of Hugging Face."""

    path: str | list[str] | None = Field(None, min_length=1)
    """File, folder, glob pattern or URI (`s3://BUCKET/train/*.jsonl`), or a list of them. Compressed files (`.gz`,
    `.bz2`, `.xz`, `.zst`) are read as well. null: `dataset`."""
    dataset: str | None = Field(None, min_length=1)
    """Name of a dataset of the Hugging Face hub, such as `openai/gsm8k`; null: `path`."""
    config: str | None = None
    """Configuration of `dataset`, such as `main`; null: its only one."""
    revision: str | None = None
    """Commit, tag or branch of `dataset`; null: the newest commit."""
    split: str | None = None
    """Split: of `dataset`; with `path`, of the files whose name or folder begins with it (`train-00000-of-00002.jsonl`,
    `train/a.jsonl`). null: all files, or the split `train` of `dataset`."""
    format: Format = "auto"
    """Format of the files; `auto` takes it from their names. `csv` includes tab-separated files (`.tsv`), `arrow` a
    folder that `datasets` saved."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of rows; null: all."""

    @property
    def is_set(self) -> bool:
        """True if a source is set."""
        return self.path is not None or self.dataset is not None

    @property
    def paths(self) -> list[str]:
        """Files, folders, patterns and URIs of `path`."""
        return [self.path] if isinstance(self.path, str) else list(self.path or ())

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        if parts.get("path") is not None and parts.get("dataset") is not None:
            yield Problem("dataset", "set together with path: expected one of them")
        for name in ("config", "revision"):
            if parts.get(name) is not None and parts.get("dataset") is None:
                yield Problem(name, f"set without dataset: {name} belongs to a dataset of the Hugging Face hub")
