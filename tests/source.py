"""Modules of the product, as the tests of the code base read them: each is parsed once in a process."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(path for package in ("components", "flows") for path in (ROOT / package).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a module. Readers must not change it."""
    return ast.parse(path.read_text(encoding="utf-8"))
