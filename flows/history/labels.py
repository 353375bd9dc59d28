"""Tags and notes of runs: `<root>/records/labels/RUN.json`, beside the records.

The files are the source of truth; `flows.runs tag` and `flows.runs note` mirror them to MLflow (`tag.NAME`, and the
description). They are separate from the records, so a live run, which rewrites its record after each stage, cannot lose
them.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from components.errors import ResourceError
from components.json_text import parse_json, write_json
from components.redaction import mask_text
from flows.history.records import FOLDER, RunRecord

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,49}")
MOST_CHARACTERS = 5000
"""Maximum length of a note."""


@dataclass(frozen=True)
class RunLabels:
    """Tags and notes of a run."""

    tags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """In the order in which they were written."""


class Labels:
    """Tags and notes of the runs below one root."""

    def __init__(self, root: Path):
        self._folder = root / FOLDER / "labels"

    def of(self, run: RunRecord) -> RunLabels:
        """Return the labels of a run. Raises ResourceError for an invalid file."""
        path = self._path(run)
        try:
            return TypeAdapter(RunLabels).validate_python(parse_json(path.read_bytes()))
        except FileNotFoundError:
            return RunLabels()
        except (ValidationError, ValueError, OSError):
            raise ResourceError(f"{path} holds no valid tags and notes; correct or delete it") from None

    def tag(self, run: RunRecord, tags: list[str]) -> RunLabels:
        """Add tags to a run. Raises ResourceError for an invalid name."""
        for tag in tags:
            if not TAG.fullmatch(tag):
                raise ResourceError(
                    f"tag {tag!r:.80} is invalid; expected at most 50 letters, digits, '_', '.' and '-', beginning "
                    "with a letter or digit"
                )
        old = self.of(run)
        return self._write(run, RunLabels(list(dict.fromkeys([*old.tags, *tags])), old.notes))

    def untag(self, run: RunRecord, tags: list[str]) -> RunLabels:
        """Remove tags from a run. Raises ResourceError for a tag that it does not have."""
        old = self.of(run)
        if missing := [tag for tag in tags if tag not in old.tags]:
            have = ", ".join(old.tags) or "none"
            raise ResourceError(f"run {run.short} has no tag {missing[0]!r:.80}; it has: {have}")
        return self._write(run, RunLabels([tag for tag in old.tags if tag not in tags], old.notes))

    def note(self, run: RunRecord, text: str) -> RunLabels:
        """Add a note, with masked secrets. Raises ResourceError for an empty or too long text."""
        text = mask_text(text.strip())
        if not 0 < len(text) <= MOST_CHARACTERS:
            raise ResourceError(f"the note has {len(text)} characters; expected 1 to {MOST_CHARACTERS}")
        old = self.of(run)
        return self._write(run, RunLabels(old.tags, [*old.notes, text]))

    def clear_notes(self, run: RunRecord) -> RunLabels:
        """Remove all notes of a run."""
        return self._write(run, RunLabels(self.of(run).tags, []))

    def _write(self, run: RunRecord, labels: RunLabels) -> RunLabels:
        path = self._path(run)
        try:
            write_json(path, asdict(labels))
        except OSError as error:
            raise ResourceError(f"cannot write {path}: {error.strerror or error}") from None
        return labels

    def _path(self, run: RunRecord) -> Path:
        return self._folder / f"{run.id}.json"
