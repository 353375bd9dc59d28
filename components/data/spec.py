"""Specs of data of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import Problem
from components.specs import Spec
from components.specs.marks import FILES, SERVER

Format = Literal["auto", "jsonl", "json", "parquet", "csv", "arrow", "text"]
HELDOUT_SHARE = 0.1
"""Share of the rows that a training without an environment holds out by default."""
LogName = Literal["openai_stored", "openai_batch", "otel", "langfuse", "langsmith", "mlflow"]
"""Forms of logs (`components.data.forms.logs`)."""
FormName = Literal[
    "auto",
    "messages",
    "sharegpt",
    "agenttraj",
    "prompt_completion",
    "ground_truth",
    "preference",
    "ranking",
    "thumbs",
    "steps",
    "step_labels",
    "trajectories",
    "served",
    LogName,
]


class SourceSpec(Spec):
    """Source of rows: files, or a dataset of Hugging Face."""

    path: Annotated[str | list[str] | None, FILES] = Field(None, min_length=1)
    """File, folder, glob pattern or URI (`s3://BUCKET/train/*.jsonl`), or a list of them. Compressed files (`.gz`,
    `.bz2`, `.xz`, `.zst`) are read as well. null: `dataset`."""
    dataset: Annotated[str | None, SERVER] = Field(None, min_length=1)
    """Name of a dataset of the Hugging Face hub, such as `openai/gsm8k`; null: `path`."""
    config: str | None = None
    """Configuration of `dataset`, such as `main`; null: its only one."""
    revision: str | None = None
    """Commit, tag or branch of `dataset`; null: the newest commit."""
    split: str | None = None
    """Split: of `dataset`; with `path`, of the files whose name or folder begins with it (`train-00000-of-00002.jsonl`,
    `train/a.jsonl`), of a folder of a served policy the kinds of feedback, such as `scores+corrections`, or `choices`.
    null: all files and kinds, or the split `train` of `dataset`."""
    format: Format = "auto"
    """Format of the files; `auto` takes it from their names. `csv` includes tab-separated files (`.tsv`), `arrow` a
    folder that `datasets` saved, `text` a row of each line, with the column `prompt`. A text in place of an object of
    `json` and `jsonl` has this column as well."""
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


class DataSpec(SourceSpec):
    """Data of one's own to train on. Without `path` and `dataset` there is none."""

    form: FormName = "auto"
    """Form of the rows; `auto` recognises it from the first rows. docs/guides/own_data.md shows each form."""
    columns: dict[str, str] | None = None
    """Columns of the data by the names that the form uses: `{prompt: question, completion: answer}`. null: the columns
    have common names."""
    ignore: list[str] = []
    """Columns that are not imported. A column that the form does not read and that looks like a label (true or false,
    two values, or the name of a label) ends the import until it is mapped in `columns` or named here."""
    reasoning: Literal["field", "text", "drop"] = "field"
    """Reasoning of imported answers: `field` trains on it in the form of the model's chat template, `text` writes it in
    front of the content as `<think>...</think>`, for models whose template has no reasoning, and `drop` leaves it out.
    """
    on_problem: Literal["drop", "strict"] = "drop"
    """Treatment of rows that fail a check: `drop` leaves them out and counts them, `strict` ends the import with all
    counts and examples."""
    max_dropped: float = Field(0.1, ge=0, le=1)
    """Maximum share of the rows that may be dropped, repetitions not counted; more end the import."""
    near_duplicates: Literal["ignore", "count", "problem"] = "count"
    """Rows whose text is almost that of an earlier row: not searched, counted and used, or treated by `on_problem`."""
    heldout: float | None = Field(None, ge=0, lt=1)
    """Share of the rows that are held out from training, chosen by their prompts: rows with equal prompts are in the
    same split. 0: none. null: none; 0.1 with `environment: null`, whose result is measured on held-out rows."""
    heldout_path: Annotated[str | list[str] | None, FILES] = Field(None, min_length=1)
    """Files of held-out rows, as `path`. Rows of `path` with the same prompts fail the check `leaked`."""
    heldout_split: str | None = None
    """Split of held-out rows, of the same source; then `split` names the rows to train on."""

    @property
    def mapped(self) -> dict[str, str]:
        """Columns of the data by the names that the form uses."""
        return self.columns or {}

    def without_ignored(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns of a row without the ignored ones."""
        if not self.ignore:
            return values
        return {name: value for name, value in values.items() if name not in self.ignore}

    @property
    def holds_out(self) -> bool:
        """True if rows are held out from training."""
        return bool(self.heldout) or self.heldout_source() is not None

    def heldout_source(self) -> SourceSpec | None:
        """Return the source of held-out rows; None without one of their own."""
        fields = SourceSpec.model_fields
        source = {name: getattr(self, name) for name in fields}
        if self.heldout_path is not None:
            return SourceSpec(path=self.heldout_path, format=self.format)
        if self.heldout_split is not None:
            return SourceSpec(**{**source, "split": self.heldout_split, "limit": None})
        return None

    def meaning(self) -> dict[str, Any]:
        """Return the settings that determine the result beside the content of the source, for stage keys."""
        places = {"path", "dataset", "config", "revision", "split", "format", "heldout_path", "heldout_split"}
        return self.model_dump(mode="json", exclude=places) | {"heldout": self.heldout or None}

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().cross_problems(parts)
        names = ("heldout", "heldout_path", "heldout_split")
        several = [name for name in names if parts.get(name) is not None]
        if len(several) > 1:
            yield Problem(several[1], f"set together with {several[0]}: expected one of {', '.join(names)}")
        if parts.get("heldout_split") is not None and parts.get("split") is None and parts.get("dataset") is None:
            yield Problem("split", "null, but heldout_split is set: the rows to train on need a split as well")
