"""A text browser: what a page of HTML looks like as text, and where its links and forms lead.

Links and buttons are shown as `[label]`, a chosen one as `[label] (chosen)`, a field for words as `[words: ____]`.
"""

from __future__ import annotations

from html.parser import HTMLParser
from urllib.parse import urlencode

BLOCKS = frozenset(
    ["p", "h1", "h2", "h3", "ul", "li", "div", "form", "br", "tr", "table", "header", "footer", "section"]
)
HIDDEN = frozenset(("head", "script", "style"))


class Page:
    """html: of the page."""

    def __init__(self, html: str):
        reader = _Reader()
        reader.feed(html)
        reader.close()
        lines = (" ".join(line.split()) for line in "".join(reader.text).split("\n"))
        self.text = "\n".join(line for line in lines if line)
        self.links: dict[str, str] = reader.links
        """Address by label in small letters; of links with one label, the first."""
        self.buttons: dict[str, str] = reader.buttons
        """Where a form without a field is sent, by the label of its button in small letters."""
        self.field: tuple[str, str] | None = reader.field
        """Where the words of the form with a field are sent, and the field's name."""

    def search(self, words: str) -> str | None:
        """The address that the page's form leads to; None where there is none."""
        if self.field is None:
            return None
        action, name = self.field
        return f"{action}?{urlencode({name: words}, errors='replace')}"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.links: dict[str, str] = {}
        self.buttons: dict[str, str] = {}
        self.field: tuple[str, str] | None = None
        self._hidden = 0
        self._form: str | None = None
        self._label: list[str] | None = None
        self._target = ""
        self._chosen = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in BLOCKS:
            self.text.append("\n- " if tag == "li" else "\n")
        if tag in HIDDEN:
            self._hidden += 1
        elif tag == "a":
            self._label, self._target, self._chosen = [], given.get("href", ""), "aria-current" in given
        elif tag == "button":
            self._label, self._chosen = [], False
        elif tag == "form":
            self._form = given.get("action", "")
        elif tag == "input" and given.get("type") in ("search", "text") and self._form is not None:
            self.field = self.field or (self._form, given.get("name", ""))
            self.text.append(f"[words: {given.get('value') or '____'}] ")

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self._label is None:
            self.text.append(data.replace("\n", " "))
        else:
            self._label.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self._hidden -= 1
        elif tag in ("a", "button") and self._label is not None:
            label = " ".join("".join(self._label).split())
            if tag == "a":
                self.links.setdefault(label.lower(), self._target)
            elif self._form is not None and self.field is None:
                self.buttons.setdefault(label.lower(), self._form)
            self.text.append(f"[{label}]{' (chosen)' if self._chosen else ''}")
            self._label = None
        elif tag == "form":
            self._form = None
        if tag in BLOCKS:
            self.text.append("\n")
