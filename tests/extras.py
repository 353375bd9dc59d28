"""Extras of pyproject.toml that `make setup` does not install and that changed since a commit, by name.

    python -m tests.extras [COMMIT]

`make test-extras` runs tests/environments/test_EXTRA.py of each. An extra has changed where a module of its
environment, one that this imports, its configuration, its tests or its requirements have. Without a commit, or with
one that is not in the repository, every extra counts as changed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "components.environments"
REQUIREMENTS = "pyproject.toml"
SHARED = ("requirements/extras-overrides.txt", "tests/conftest.py", "tests/environments/checks.py", "tests/extras.py")
"""Files that every extra depends on."""


def requirements(text: str) -> dict[str, list[str]]:
    """Return the requirements of each extra with an environment, by its name, that are not among those of `dev`, from
    the text of a pyproject.toml."""
    extras: dict[str, list[str]] = tomllib.loads(text)["project"]["optional-dependencies"]
    installed = {_name(requirement) for requirement in extras.pop("dev")}
    return {
        extra: sorted(requirements)
        for extra, requirements in extras.items()
        if not {_name(requirement) for requirement in requirements} <= installed
        and (ROOT / "tests/environments" / f"test_{extra}.py").is_file()
    }


def files(extra: str) -> set[str]:
    """Return the paths, from the repository's root, of what an extra's tests depend on."""
    folder = ROOT / PACKAGE.replace(".", "/")
    modules = _imported(sorted(folder.rglob(f"{extra}*.py")))
    own = [*(ROOT / "conf" / "environment").glob(f"{extra}.yaml"), *(ROOT / "tests/environments").glob(f"*{extra}*.py")]
    return {path.relative_to(ROOT).as_posix() for path in (*modules, *own)} | set(SHARED)


def changed(commit: str | None) -> list[str]:
    """Return the names of the extras that changed since a commit, all of them where the commit is unknown."""
    present = requirements((ROOT / REQUIREMENTS).read_text(encoding="utf-8"))
    if not commit or _git("cat-file", "-e", f"{commit}^{{commit}}") is None:
        return list(present)
    paths = set((_git("diff", "--name-only", commit) or "").splitlines())
    past = requirements(_git("show", f"{commit}:{REQUIREMENTS}") or "")
    return [extra for extra in present if files(extra) & paths or present[extra] != past.get(extra)]


def _imported(modules: Iterable[Path]) -> set[Path]:
    """Return modules and those of the package that they import, directly or not."""
    pending, known = list(modules), set[Path]()
    while pending:
        path = pending.pop()
        if path in known or not path.is_file():
            continue
        known.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
                pending += [ROOT / f"{name.replace('.', '/')}.py" for name in names]
    return known


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found[0].lower()


def _git(*arguments: str) -> str | None:
    """Return what git prints; None where it fails, or where there is no git."""
    call: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True}
    try:
        done = subprocess.run(["git", *arguments], **call)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    print(" ".join(changed(sys.argv[1] if len(sys.argv) > 1 else None)))
