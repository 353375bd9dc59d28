"""The code as it is now, for another machine: a folder that holds what git would take, the changes included.

    FOLDER/<digest>/            the files, and `snapshot.json`: commit, digest, the changes against the commit

Equal code has an equal digest and is copied once. What git ignores stays here. Code that is in no git repository
(an installed package) travels as its packages.
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
from components.errors import ResourceError

RECORD = "snapshot.json"
LIMIT = 200 * 10**6
"""Bytes of code that travel; more is a mistake, such as a folder of data that git does not ignore."""


@dataclass(frozen=True)
class Snapshot:
    path: Path
    digest: str
    """sha256 over names, contents and modes of the files."""
    commit: str | None
    """None where the code is in no git repository."""
    changed: tuple[str, ...]
    """Files that differ from the commit, or are not in it."""


def take(code: Path, packages: Sequence[str], folder: Path) -> Snapshot:
    """A snapshot of the repository at `code`, and of the user's packages, below `folder`.

    Raises ResourceError for a package that is compiled or too large to travel.
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
        listed = _git(code, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
        files = {name: code / name for name in listed.split("\0") if name and (code / name).is_file()}
        status = _git(code, "status", "--porcelain", "-z", "--no-renames") or ""
        changed = sorted(line[3:] for line in status.split("\0") if line)
    for package in packages:
        files |= _package(package, code)
    size = sum(path.stat().st_size for path in files.values())
    if size > LIMIT:
        largest = max(files, key=lambda name: files[name].stat().st_size)
        raise ResourceError(
            f"the code at {code} has {size / 1e6:.0f} MB and at most {LIMIT / 1e6:.0f} travel to another machine; the "
            f"largest file is {largest}: let .gitignore name what is no code"
        )
    digest = _digest(files)
    snapshot = Snapshot(folder / digest[:16], digest, commit, tuple(changed))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as lock:
        lock_file(lock, "snapshot of the code", 300)
        if not snapshot.path.is_dir():
            _copy(files, snapshot, _git(code, "diff", "HEAD", "--binary") if changed else None)
    return snapshot


def _copy(files: dict[str, Path], snapshot: Snapshot, diff: str | None) -> None:
    aside = Path(tempfile.mkdtemp(dir=snapshot.path.parent))
    try:
        for name, source in files.items():
            target = aside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
        record = {"commit": snapshot.commit, "digest": snapshot.digest, "changed": snapshot.changed, "diff": diff}
        (aside / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        aside.chmod(0o755)
        os.rename(aside, snapshot.path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _package(name: str, code: Path) -> dict[str, Path]:
    """The files of a user's package; none where they travel with the code or are installed from the index."""
    top = name.partition(".")[0]
    found = find_spec(top)
    if found is None:
        raise ResourceError(f"allow: the package {top} cannot be found here, so it cannot travel to another machine")
    if found.origin is not None and not found.submodule_search_locations:
        path = Path(found.origin)
        return {} if path.is_relative_to(code) or _installed(path) else {path.name: path}
    folders = [Path(one) for one in found.submodule_search_locations or ()]
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
        with open(files[name], "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        runs = bool(files[name].stat().st_mode & 0o100)
        total.update(f"{name}\0{content}\0{runs}\n".encode())
    return total.hexdigest()


def _git(code: Path, *arguments: str) -> str | None:
    """What git says, without the end of its last line; None where it says nothing of this folder."""
    try:
        done = subprocess.run(
            ["git", "-C", str(code), *arguments], capture_output=True, timeout=60, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").rstrip("\n")
