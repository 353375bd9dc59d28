"""Hooks of mkdocs: README.md and CONTRIBUTING.md, which lie outside of docs/, become pages of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File

    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=relinked(text, "")))
    return files


def on_page_markdown(markdown: str, page: object, config: object, files: object) -> str:
    """Point links of a page at the pages of the site."""
    return relinked(markdown, "../")


def relinked(text: str, up: str) -> str:
    """Return text with links to pages of the site; links to other files of the repository become code.

    up: prefix of links to files of the repository's root.
    """

    def link(match: re.Match[str]) -> str:
        image, title, target = match.groups()
        file, anchor_mark, anchor = target.partition("#")
        if "://" in target or not file:
            return match[0]
        inside = file.removeprefix(up) if up and file.startswith(up) else file if not up else None
        if inside is None:
            return match[0]
        inside = PAGES.get(inside, inside)
        if inside.startswith("docs/"):
            return f"{image}[{title}]({inside.removeprefix('docs/')}{anchor_mark}{anchor})"
        if inside in PAGES.values():
            return f"{image}[{title}]({inside}{anchor_mark}{anchor})"
        return title if title == f"`{inside}`" else f"{title} (`{inside}`)"

    return _LINK.sub(link, text)
