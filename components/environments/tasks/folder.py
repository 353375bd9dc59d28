"""Folders of tasks in Harbor's format, each

    instruction.md    the task, for the agent
    task.toml         limits and metadata (`config.KEYS`)
    environment/      Dockerfile and the files that it copies (`image.Image`)
    tests/            test.sh, which writes a reward to /logs/verifier/reward.txt or reward.json
    solution/         solve.sh, optional

A task that the sandbox cannot run as it is meant is refused with every reason, before anything runs.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.environments.tasks.config import parse
from components.environments.tasks.image import Image
from components.errors import Problem, ResourceError, SpecError

LOG = logging.getLogger(__name__)
MAX_BYTES = 16 << 20
"""Maximum size of the files of a task."""
WORK, TESTS = "work", "tests"
"""Folders of archives: the working folder, and the tests."""
_IGNORED = ("__pycache__", ".DS_Store")
_UNSUPPORTED = (
    *("trajectory.json", "steps", "tests/.harborignore", "solution/.harborignore"),
    *("environment/docker-compose.yaml", "environment/.dockerignore"),
)


@dataclass(frozen=True)
class FolderTask:
    """A task that the sandbox can run."""

    name: str
    """Name of its folder."""
    instruction: str
    settings: Mapping[str, Any]
    """Settings of `task.toml` by key, such as `verifier.timeout_sec` (`config.parse`)."""
    workdir: str
    """Path of the working folder in the sandbox."""
    variables: Mapping[str, str]
    work: bytes = field(repr=False)
    """Archive of the working folder at the start, below WORK."""
    tests: bytes = field(repr=False)
    """Archive of the tests, below TESTS."""
    solution: Mapping[str, bytes] = field(repr=False)
    """Contents of the solution's files by path; empty if it has none."""


def read_tasks(path: str, *, offline: bool = False, skip: bool = False) -> tuple[FolderTask, ...]:
    """Return the tasks in a folder, or the one that it is, by name. Raises ResourceError if there are none, SpecError
    with every reason if the sandbox cannot run some.

    offline: run tasks that ask for the network without one. skip: leave out tasks that the sandbox cannot run.
    """
    stamps = [file.lstat() for folder in _folders(path) for file in _files(folder)]
    return _read(path, tuple((stamp.st_ino, stamp.st_mtime_ns, stamp.st_size) for stamp in stamps), offline, skip)


def content_digest(path: str) -> str:
    """Return the digest of all files of the tasks, for stage keys."""
    files = [(folder, file) for folder in _folders(path) for file in _files(folder) if not file.is_symlink()]
    rows = [
        [folder.name, str(file.relative_to(folder)), _executable(file), hashlib.sha256(file.read_bytes()).hexdigest()]
        for folder, file in files
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def archive(top: str, files: Mapping[str, Path]) -> bytes:
    """Return a tar archive of files, by their paths below the folder `top`, without times and owners."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, file in [("", None), *files.items()]:
            entry = tarfile.TarInfo(f"{top}/{name}".rstrip("/"))
            entry.type = tarfile.DIRTYPE if file is None else tarfile.REGTYPE
            entry.mode = 0o755 if file is None or _executable(file) else 0o644
            content = b"" if file is None else file.read_bytes()
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


@functools.lru_cache(maxsize=8)  # a collector creates many environments with the same folder
def _read(path: str, stamps: Sequence[object], offline: bool, skip: bool) -> tuple[FolderTask, ...]:
    tasks, problems = [], []
    for folder in _folders(path):
        task, reasons = _task(folder, offline)
        problems += [Problem(f"environment.path: task {folder.name}", reason) for reason in reasons]
        if task is not None and not reasons:
            tasks.append(task)
    if problems and not (skip and tasks):
        raise SpecError(problems)
    for problem in problems:
        LOG.warning("left out: %s", problem)
    return tuple(tasks)


def _task(folder: Path, offline: bool) -> tuple[FolderTask | None, list[str]]:
    """Return a task, and the reasons why the sandbox cannot run it."""
    files = _files(folder)
    names = {str(file.relative_to(folder)) for file in files}
    problems = [f"{name} is not supported" for name in _UNSUPPORTED if (folder / name).exists()]
    problems += [f"{file.relative_to(folder)} is a symbolic link" for file in files if file.is_symlink()]
    problems += [f"has no {name}" for name in ("instruction.md", "tests/test.sh") if name not in names]
    if sum(file.lstat().st_size for file in files) > MAX_BYTES:
        problems.append(f"has more than {MAX_BYTES} bytes of files")
    if problems:
        return None, problems
    try:
        settings, problems = parse((folder / "task.toml").read_text(encoding="utf-8"), offline)
        instruction = _without_canaries((folder / "instruction.md").read_text(encoding="utf-8"))
        if problems:
            return None, [f"task.toml: {problem}" for problem in problems]
        image = Image(folder / "environment", _below("environment", names), settings)
    except (ValueError, OSError) as error:  # no UTF-8, an open quote, invalid JSON, or no permission
        return None, [f"instruction.md, task.toml or environment/Dockerfile cannot be read: {error}"]
    if image.problems:
        return None, image.problems
    return FolderTask(
        name=folder.name,
        instruction=instruction,
        settings=settings,
        workdir=str(image.workdir),
        variables=image.variables,
        work=archive(WORK, image.files),
        tests=archive(TESTS, {name: folder / TESTS / name for name in _below(TESTS, names)}),
        solution={name: (folder / "solution" / name).read_bytes() for name in _below("solution", names)},
    ), []


def _folders(path: str) -> list[Path]:
    folder = Path(path).expanduser().resolve()
    single = (folder / "task.toml").is_file()
    folders = [folder] if single else sorted(file.parent for file in folder.glob("*/task.toml"))
    if not folders:
        raise ResourceError(
            f"environment.path: {path} contains no task; expected a folder of tasks, which are folders with a task.toml"
        )
    return folders


def _files(folder: Path) -> list[Path]:
    """Return all files of a task, and links."""
    paths = sorted(folder.rglob("*"))
    return [path for path in paths if (path.is_symlink() or path.is_file()) and not set(_IGNORED) & set(path.parts)]


def _below(top: str, names: Iterable[str]) -> list[str]:
    """Return the paths below a folder, relative to it."""
    return sorted(name.removeprefix(f"{top}/") for name in names if name.startswith(f"{top}/"))


def _executable(file: Path) -> bool:
    return file.suffix == ".sh" or bool(file.stat().st_mode & 0o100)


def _without_canaries(text: str) -> str:
    """Return an instruction without the comments at its beginning that mark benchmark data."""
    lines, end = text.split("\n"), 0
    for number, line in enumerate(map(str.strip, lines[:-1]), 1):
        comment = line.startswith("#") or (line.startswith("<!--") and line.endswith("-->"))
        if comment and "canary" in line.lower():
            end = number
        elif line:
            break
    return "\n".join(lines[end:]).lstrip() if end else text
