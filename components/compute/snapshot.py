"""Snapshot of the current code for another machine: a folder with the files that git would add, changes included.

    FOLDER/<digest>/            the files, and `snapshot.json`: commit, digest, and the diff against the commit

Equal code has an equal digest and is copied once. Files that git ignores are left out. Code outside a git repository
(an installed package) is copied package by package.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from components.artifacts import lock_file
from components.artifacts.keys import file_digest
from components.errors import ResourceError

RECORD = "snapshot.json"
LIMIT = 200 * 10**6
"""Maximum bytes of code; more is a mistake, such as a folder of data that git does not ignore."""


@dataclass(frozen=True)
class Snapshot:
    path: Path
    digest: str
    """sha256 over names, contents and modes of the files."""
    commit: str | None
    """Commit; None if the code is in no git repository."""
    changed: tuple[str, ...]
    """Files that differ from the commit, or are not in it."""


def take_snapshot(code: Path, packages: Sequence[str], folder: Path) -> Snapshot:
    """Return a snapshot of the repository at `code` and of the user's packages, stored below `folder`.

    Raises ResourceError for a package that is compiled or too large.
    """
    commit = _git(code, "rev-parse", "HEAD")
    changed: list[str] = []
    if commit is None:
        files = {
            f"{name}/{file}": path for name in ("components", "flows", "conf") for file, path in _tree(code / name)
        }
        files |= {name: code / name for name in ("pyproject.toml",) if (code / name).is_file()}
        files |= {f"requirements/{name}": path for name, path in _tree(code / "requirements")}
    else:
        tracked = _git(code, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
        files = {name: code / name for name in tracked.split("\0") if name and (code / name).is_file()}
        status = _git(code, "status", "--porcelain", "-z", "--no-renames") or ""
        changed = sorted(line[3:] for line in status.split("\0") if line)
    for package in packages:
        files |= _package(package, code)
    size = sum(path.stat().st_size for path in files.values())
    if size > LIMIT:
        largest = max(files, key=lambda name: files[name].stat().st_size)
        raise ResourceError(
            f"the code at {code} has {size / 1e6:.0f} MB, expected at most {LIMIT / 1e6:.0f} for a snapshot; the "
            f"largest file is {largest}: list files that are not code in .gitignore"
        )
    digest = _digest(files)
    snapshot = Snapshot(folder / digest[:16], digest, commit, tuple(changed))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as lock:
        lock_file(lock, "the snapshot of the code", 300)
        if not snapshot.path.is_dir():
            _copy(files, snapshot, _git(code, "diff", "HEAD", "--binary") if changed else None)
    return snapshot


def _copy(files: dict[str, Path], snapshot: Snapshot, diff: str | None) -> None:
    temporary = Path(tempfile.mkdtemp(dir=snapshot.path.parent))
    try:
        for name, source in files.items():
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
        record = {"commit": snapshot.commit, "digest": snapshot.digest, "changed": snapshot.changed, "diff": diff}
        (temporary / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        os.rename(temporary, snapshot.path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _package(name: str, code: Path) -> dict[str, Path]:
    """Return the files of a user's package; none if the code contains it or it is installed from the index."""
    top = name.partition(".")[0]
    package_spec = find_spec(top)
    if package_spec is None:
        raise ResourceError(f"allow: package {top} not found, so it cannot be copied to another machine")
    if package_spec.origin is not None and not package_spec.submodule_search_locations:
        path = Path(package_spec.origin)
        return {} if path.is_relative_to(code) or _installed(path) else {path.name: path}
    folders = [Path(location) for location in package_spec.submodule_search_locations or ()]
    return {
        f"{top}/{file}": path
        for folder in folders
        if not folder.is_relative_to(code) and not _installed(folder)
        for file, path in _tree(folder)
    }


def _installed(path: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(path.parts))


def _tree(folder: Path) -> Iterable[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in path.parts[-3:]):
            yield path.relative_to(folder).as_posix(), path


def _digest(files: dict[str, Path]) -> str:
    total = hashlib.sha256()
    for name in sorted(files):
        executable = bool(files[name].stat().st_mode & 0o100)
        total.update(f"{name}\0{file_digest(files[name])}\0{executable}\n".encode())
    return total.hexdigest()


def _git(code: Path, *arguments: str) -> str | None:
    """Return the output of git without its last line end; None if git fails for this folder."""
    try:
        completed = subprocess.run(
            ["git", "-C", str(code), *arguments], capture_output=True, timeout=60, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.decode(errors="replace").rstrip("\n")
