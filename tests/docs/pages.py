"""README and the pages in docs/, as the tests look at them: their code blocks, links and headings."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
"""Pages of the site."""
SKILL = ROOT / "skills" / "espalier" / "SKILL.md"
ALL_PAGES = [*PAGES, ROOT / "AGENTS.md", SKILL]
"""Those of the site, and those that agents are given."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"In `~/mine/([\w./]+)`:\n\n\Z")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    file: str | None
    """Path below ~/mine, where the block is a file that the user writes."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """The code blocks of a page, in order; all languages where none is named."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        file = _FILE.search(text[: match.start()])
        block = Block(page, text.count("\n", 0, match.start()) + 2, match[1], match[2], file and file[1])
        if not languages or block.language in languages:
            found.append(block)
    return found


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks, each with those that go on with it."""
    whole = [re.sub(r"\\\n\s*", "", block.text) for block in blocks(page, "sh")]
    return [line for text in whole for line in text.splitlines() if line.strip()]


def words(command: str) -> list[str]:
    """A command line as the shell would split it; variables set in front of it and comments left out."""
    parts = shlex.split(command, comments=True)
    while parts and re.match(r"\w+=", parts[0]):
        parts.pop(0)
    return parts


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may name, made as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@contextmanager
def own_package(page: Path, home: Path, package: str) -> Iterator[Path]:
    """Write the user's files of a page below `home`, and make their package importable inside the block. Yield their
    folder."""
    mine = home / "mine"
    for block in blocks(page):
        if block.file:
            path = mine / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    sys.path.insert(0, str(mine))
    importlib.invalidate_caches()
    try:
        yield mine
    finally:
        sys.path.remove(str(mine))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
