"""Settings of the recording of a served policy."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from components.specs import Spec

DAY = 86400.0


class RecordsSpec(Spec):
    """Retention and redaction of recorded conversations."""

    days: float = Field(30.0, gt=0, le=36500)
    """Age in days at which conversations and their feedback are deleted, while a server records."""
    megabytes: float = Field(1024.0, ge=1)
    """Size at which the oldest are deleted."""
    redact: list[str] = []
    """Regular expressions of text that is replaced by `[redacted]`. A conversation with such text is recorded without
    tokens."""

    @property
    def file_seconds(self) -> float:
        """Time from the first to the last answer of a file."""
        return min(DAY, self.days * DAY / 10)

    @property
    def file_bytes(self) -> float:
        """Size at which a new file begins."""
        return min(16.0, self.megabytes / 10) * 2**20

    @field_validator("redact")
    @classmethod
    def _usable(cls, value: list[str]) -> list[str]:
        for text in value:
            try:
                empty = re.compile(text).search("") is not None
            except re.error as error:
                raise ValueError(f"regular expressions; {text!r} is none: {error}") from None
            if empty:
                raise ValueError(f"regular expressions that need text; {text!r} matches empty text")
        return value
