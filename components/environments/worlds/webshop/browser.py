"""Text browser: it renders an HTML page as text and extracts the targets of its links and forms.

Links and buttons are shown as `[label]`, a selected link as `[label] (chosen)`, a text field as `[words: ____]`.
"""

from __future__ import annotations

from html.parser import HTMLParser
from urllib.parse import urlencode

BLOCKS = frozenset(
    ["p", "h1", "h2", "h3", "ul", "li", "div", "form", "br", "tr", "table", "header", "footer", "section"]
)
HIDDEN = frozenset(("head", "script", "style"))


class Page:
    """Parsed HTML page."""

    def __init__(self, html: str):
        reader = _Reader()
        reader.feed(html)
        reader.close()
        lines = (" ".join(line.split()) for line in "".join(reader.text).split("\n"))
        self.text = "\n".join(line for line in lines if line)
        self.links: dict[str, str] = reader.links
        """Address by lower-case label; of several links with the same label, the first."""
        self.buttons: dict[str, str] = reader.buttons
        """Action of a form without a text field, by the lower-case label of its button."""
        self.field: tuple[str, str] | None = reader.field
        """Action of the form with a text field, and the field's name."""

    def search(self, words: str) -> str | None:
        """Return the address to which the form with a text field leads, or None if the page has no such form."""
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
        attributes = {name: value or "" for name, value in attrs}
        if tag in BLOCKS:
            self.text.append("\n- " if tag == "li" else "\n")
        if tag in HIDDEN:
            self._hidden += 1
        elif tag == "a":
            self._label, self._target, self._chosen = [], attributes.get("href", ""), "aria-current" in attributes
        elif tag == "button":
            self._label, self._chosen = [], False
        elif tag == "form":
            self._form = attributes.get("action", "")
        elif tag == "input" and attributes.get("type") in ("search", "text") and self._form is not None:
            self.field = self.field or (self._form, attributes.get("name", ""))
            self.text.append(f"[words: {attributes.get('value') or '____'}] ")

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
