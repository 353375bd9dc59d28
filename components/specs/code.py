"""Digests of the project's code: the modules that a module may execute, by import statements, without importing them.

Unlike `components.specs.source`, which digests a user's code for stage keys, these digests are information about a
result. They are computed for each stage that runs, so imports are read with a regular expression in place of a parser:
0.1 s for the whole project. A statement within a text counts as an import; it adds a module too many at worst.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
"""Folder that contains the packages of the project."""
PACKAGES = ("components", "flows.stages")
"""Packages whose modules compute results."""
NEUTRAL = ("components.compute", "components.tracking")
"""Packages that place and track stages, and do not affect their results."""
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<base>[\w.]+)[ \t]+import[ \t]+(?P<names>\([^()]*\)|[^\n;(]+)"
    r"|import[ \t]+(?P<modules>[^\n;]+))",
    re.MULTILINE,
)
_NAME = re.compile(r"\s*([\w.]+)")


def modules_of(roots: Iterable[str]) -> dict[str, str]:
    """Return the sha256 (hex, first 16 characters) of the source file of each module of `PACKAGES` that the root
    modules import, directly or indirectly, the roots included. Other packages are left out."""
    digests: dict[str, str] = {}
    todo = list(roots)
    visited = set(todo)
    while todo:
        module = todo.pop()
        file = _file(module)
        if file is None:
            continue
        path, status = file
        digests[module], imports = _read(module, path, status.st_mtime_ns, status.st_size)
        todo += imports - visited
        visited |= imports
    return dict(sorted(digests.items()))


def code_digest(modules: Mapping[str, str]) -> str:
    """Return the sha256 (hex) over the names and digests of modules; empty without modules."""
    if not modules:
        return ""
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(modules.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def imported_names(module: str, text: str, *, is_package: bool) -> Iterator[str]:
    """Yield the absolute names that the import statements of a module's source may import, including attributes."""
    package = module if is_package else module.rpartition(".")[0]
    for match in _IMPORT.finditer(text):
        if match["modules"] is not None:
            yield from _listed(match["modules"])
            continue
        base = match["base"]
        if base.startswith("."):
            level = len(base) - len(base.lstrip("."))
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - level + 1], *filter(None, [base.lstrip(".")])])
        yield base
        yield from (f"{base}.{name}" for name in _listed(match["names"]))


def _listed(text: str) -> Iterator[str]:
    """Yield the names of a list in an import statement, without comments and `as` names."""
    plain = re.sub(r"#[^\n]*", "", text.strip().strip("()"))
    return (match[1] for part in plain.split(",") if (match := _NAME.match(part)))


@functools.cache
def _belongs(module: str) -> bool:
    def below(packages: Iterable[str]) -> bool:
        return any(module == package or module.startswith(f"{package}.") for package in packages)

    return below(PACKAGES) and not below(NEUTRAL)


def _file(module: str) -> tuple[str, os.stat_result] | None:
    """Return the source file of a module of the project that counts; None for others and for attributes.

    Called for every name that a module imports, of which most are attributes: plain texts cost a tenth of paths."""
    if not _belongs(module):
        return None
    base = f"{PROJECT}/{module.replace('.', '/')}"
    for path in (f"{base}.py", f"{base}/__init__.py"):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode):
                return path, status
    return None


@functools.lru_cache(maxsize=4096)
def _read(module: str, path: str, modified: int, size: int) -> tuple[str, frozenset[str]]:
    """Return the digest of a source file and the names that it imports from packages that count. modified, size: of the
    file, so that an edited file is read again."""
    source = Path(path).read_bytes()
    names = imported_names(module, source.decode(errors="replace"), is_package=path.endswith("/__init__.py"))
    imports = frozenset(name for name in names if _belongs(name))
    return hashlib.sha256(source).hexdigest()[:16], imports
