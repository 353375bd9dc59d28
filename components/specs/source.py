"""The digest of code that is not ours.

Where an environment, a reward or a filter comes from a user's package, its source is part of what its stage computes:
an edited environment must not be answered from the cache. The digest covers the module of the class and, of the same
top-level package, all modules that it imports, directly or not, as the import statements say.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from components.errors import Problem, SpecError


def source_digest(module: str) -> str:
    """sha256 over the names and source files of a module and of what it imports from its own package.

    Raises SpecError where the module has no source.
    """
    files = {module: _source(module)}
    if files[module] is None:
        raise SpecError([Problem(module, "has no source file, so its results could not be cached safely")])
    todo = [module]
    while todo:
        name = todo.pop()
        for imported in _imports(name, files[name]):
            if imported not in files:
                files[imported] = _source(imported)
                todo.append(imported)
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        if path is not None:
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _source(module: str) -> Path | None:
    try:
        found = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        return None  # a name looked up as if it were a module; or `__main__`, which no other process could import
    path = Path(found.origin) if found is not None and found.origin is not None else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


def _imports(module: str, path: Path | None) -> Iterator[str]:
    """Modules of the same top-level package that a file may import, with names that turn out to be none."""
    if path is None:
        return
    top = module.partition(".")[0]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == top)
