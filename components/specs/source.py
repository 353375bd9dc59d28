"""Digests of user source code.

If an environment, a reward or a filter comes from a user's package, its source is part of the stage key: an edited
environment must not be served from the cache. The digest covers the module of the class and all modules of the same
top-level package that it imports, directly or indirectly, according to the import statements. A user's program that
runs as a subprocess is read from its files; nothing of it is imported here.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from components.errors import Problem, SpecError

_PARSER = threading.Lock()
"""Python before 3.11.9 counts the depth of trees that several threads build in one number (gh-106905), and fails with a
SystemError where they overlap."""


def source_digest(module: str) -> str:
    """Return the sha256 over the names and source files of a module and of its imports from the same package.

    Raises SpecError if the module has no source file.
    """
    source = source_file(module)
    top = module.partition(".")[0]
    return _digest({module: source}, lambda name: _source(name) if name.partition(".")[0] == top else None)


def source_file(module: str) -> Path:
    """Return the source file of a module. Raises SpecError if it has none."""
    source = _source(module)
    if source is None:
        raise SpecError([Problem(module, "has no source file, so its results could not be cached safely")])
    return source


def script_digest(script: Path) -> str:
    """Return the sha256 over a Python script and the modules beside or below it that it imports."""
    return _digest({script.name: script}, lambda name: _below(script.parent, name))


def module_digest(folder: Path, module: str) -> str | None:
    """Return the sha256 over a module run from a folder (`python -m`) and its imports; None if it is not below it."""
    names = [*_parents(module), f"{module}.__main__"]
    files = {name: path for name in names if (path := _below(folder, name)) is not None}
    return _digest(files, lambda name: _below(folder, name)) if files else None


def _digest(files: Mapping[str, Path | None], find: Callable[[str], Path | None]) -> str:
    """Return the sha256 over the names and contents of files and of their imports, as far as `find` locates them."""
    files = dict(files)
    todo = list(files)
    while todo:
        name = todo.pop()
        for imported in _imports(name, files[name]):
            if imported not in files:
                files[imported] = find(imported)
                todo.append(imported)
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        if path is not None:
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _source(module: str) -> Path | None:
    try:
        module_spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        return None  # an attribute rather than a module; or `__main__`, which no other process could import
    path = Path(module_spec.origin) if module_spec is not None and module_spec.origin is not None else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


def _below(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _parents(module: str) -> list[str]:
    """Return the packages around a module, and the module itself."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _imports(module: str, path: Path | None) -> Iterator[str]:
    """Yield the modules that a file may import, including names that turn out not to be modules."""
    if path is None:
        return
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    try:
        with _PARSER:
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # invalid, or for another Python version: its imports are unknown
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from names
