"""Overrides in messages, quoted for the shell and for Hydra's grammar."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[a-z_][\w-]*", re.IGNORECASE | re.ASCII)
"""Text that needs no quotes."""


def override(key: str, value: Sequence[str] | Mapping[str, str]) -> str:
    """Return an override that sets a list or a mapping of texts, as a word of a shell's command line."""
    texts = {name: text if _PLAIN.fullmatch(text) else _hydra_quoted(text) for name, text in _items(value)}
    if isinstance(value, Mapping):
        return shlex.quote(f"{key}={{{', '.join(f'{name}: {text}' for name, text in texts.items())}}}")
    return shlex.quote(f"{key}=[{', '.join(texts.values())}]")


def _items(value: Sequence[str] | Mapping[str, str]) -> Iterable[tuple[Any, str]]:
    return value.items() if isinstance(value, Mapping) else enumerate(value)


def _hydra_quoted(text: str) -> str:
    """Return a text in the quotes of Hydra's grammar. Backslashes are escapes only before a quote."""
    escaped = re.sub(r"(?<!\\)(\\*+)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"
