"""Generated parts of pages, between `<!-- MARK -->` and `<!-- /MARK -->`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

DOCS = Path(__file__).parent


class Content(Protocol):
    """Function that returns the current text of a generated part."""

    def __call__(self) -> str: ...


@dataclass(frozen=True)
class Generated:
    """One generated part of a page."""

    page: str
    """Path below docs."""
    mark: str
    content: Content

    def stored(self) -> str:
        """Return the page as it is stored."""
        return (DOCS / self.page).read_text(encoding="utf-8")

    def current(self) -> str:
        """Return the page with its generated part recomputed."""
        begin, end = f"<!-- {self.mark} -->", f"<!-- /{self.mark} -->"
        before, _, rest = self.stored().partition(begin)
        return f"{before}{begin}\n{self.content()}{end}{rest.partition(end)[2]}"

    def write(self) -> None:
        """Write the page."""
        (DOCS / self.page).write_text(self.current(), encoding="utf-8")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def one_line(text: str | None) -> str:
    """Return a text on one line."""
    return " ".join((text or "").split())
