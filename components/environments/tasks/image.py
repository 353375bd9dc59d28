"""The image of a task, as far as the sandbox can stand for it: a system with Python, and files of the task.

Supported are `FROM python`, `ubuntu` or `debian`, `WORKDIR`, `COPY` of files below `environment/` into the working
folder, `ENV`, and what has no effect here (`CMD`, `LABEL`). Everything else is a problem that refuses the task. The
version of the image is not reproduced: programs are those of this machine.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from components.environments.tasks.config import VARIABLE

_BASE = re.compile(r"(docker\.io/)?(library/)?(python|ubuntu|debian)(:[\w.-]+)?")
_SYSTEM = (
    *("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "logs", "opt", "proc", "root", "run"),
    *("sbin", "solution", "sys", "tests", "tmp", "usr", "var"),
)
"""Folders at the top that are not the task's."""


class Image:
    """Working folder of a task. folder: `environment/` of the task. names: paths of the files in it. settings: those of
    its `task.toml`."""

    def __init__(self, folder: Path, names: Sequence[str], settings: Mapping[str, Any]):
        self.problems: list[str] = []
        self.variables: dict[str, str] = {}
        self.files: dict[str, Path] = {}
        """Files of the working folder, by their paths in it."""
        self._names = [PurePosixPath(name) for name in names]
        self._copied: dict[PurePosixPath, PurePosixPath] = {}
        self._at = PurePosixPath("/")
        for instruction, text in self._instructions(folder, settings):
            self._apply(instruction, text)
        self.workdir = PurePosixPath("/") / (settings["environment.workdir"] or self._at)
        """Path of the working folder."""
        self.variables |= settings["environment.env"]
        top, *others = self.workdir.parts[1:] or ("",)
        if top in ("", *_SYSTEM) or ".." in others or "\0" in str(self.workdir):
            self.problems.append(
                f"the working folder is {self.workdir}; expected one outside of the system's folders, such as /app, "
                "by WORKDIR in environment/Dockerfile or environment.workdir in task.toml"
            )
        for path, source in sorted(self._copied.items()):
            if path.is_relative_to(self.workdir):
                self.files[str(path.relative_to(self.workdir))] = folder / source
            else:
                self.problems.append(f"environment/Dockerfile: COPY writes {path}, outside of {self.workdir}")

    def _instructions(self, folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield instructions and their arguments, without comments and continued lines. A task with an image in place
        of a Dockerfile has all its files in the working folder."""
        image, file = settings["environment.docker_image"], PurePosixPath("Dockerfile")
        if (image is None) != (file in self._names):
            self.problems.append("expected environment/Dockerfile or environment.docker_image, exactly one of the two")
        elif image is not None:
            yield from (("FROM", image), ("WORKDIR", settings["environment.workdir"] or "/"), ("COPY", ". ."))
        else:
            if "\0" in (text := (folder / file).read_text(encoding="utf-8")):
                raise ValueError("it contains a zero byte")
            text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
            for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
                if words := line.split(maxsplit=1):
                    yield words[0].upper(), "".join(words[1:]).strip()

    def _apply(self, instruction: str, text: str) -> None:
        if instruction == "WORKDIR" and "$" not in text:
            self._at /= text.strip("\"'")
        elif instruction == "COPY" and not re.search(r"(^|\s)--|<<|\$", text):
            self._copy(json.loads(text) if text.startswith("[") else text.split())
        elif instruction == "ENV" and "$" not in text and (variables := _variables(text)):
            self.variables |= variables
        elif instruction not in ("CMD", "LABEL") and not (instruction == "FROM" and _BASE.fullmatch(text)):
            self.problems.append(
                f"environment/Dockerfile: {instruction} {text:.80}: needs a container image, and none is built; "
                "expected FROM python, ubuntu or debian, WORKDIR, COPY SOURCE TARGET and ENV NAME=VALUE"
            )

    def _copy(self, words: Sequence[str]) -> None:
        """Copy as Docker does: the content of a folder; a file into a folder, or to a path."""
        *sources, target = words
        if not sources:
            raise ValueError(f"COPY {target} has no source")
        path = PurePosixPath(posixpath.normpath(self._at / target))
        into = target.endswith("/") or len(sources) > 1 or path == self._at
        into = into or any(path in copied.parents for copied in self._copied)
        for source in sources:
            pattern, count = str(PurePosixPath(source.lstrip("/"))), len(self._copied)
            for name in self._names:
                part = next((part for part in (name, *name.parents) if _matches(part, pattern)), None)
                if part is not None:
                    inside = PurePosixPath(name.name if into else "") if part == name else name.relative_to(part)
                    self._copied[path / inside] = name
            if len(self._copied) == count:
                self.problems.append(f"environment/Dockerfile: COPY {source}: environment/ has no such file")


def _variables(text: str) -> dict[str, str]:
    """Return the variables of `ENV NAME=VALUE ...`; empty in the earlier form without `=`."""
    pairs = [pair.partition("=") for pair in shlex.split(text)]
    valid = all(equals and VARIABLE.fullmatch(name) for name, equals, _ in pairs)
    return {name: value for name, _, value in pairs} if valid else {}


def _matches(path: PurePosixPath, pattern: str) -> bool:
    return str(path) == pattern or (
        len(path.parts) == pattern.count("/") + 1 and pattern != "." and path.match(pattern)
    )
