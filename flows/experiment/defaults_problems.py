"""Problems of defaults lists in config files, with the entry that works.

Hydra looks a group without a leading / up below the folder of the file, and takes `override` only for a group that is
chosen elsewhere. Its messages say neither; these name the file, the entry as written and the corrected entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.default_element import ConfigDefault, GroupDefault, InputDefault
from hydra.core.object_type import ObjectType

from components.specs import nearest
from flows.experiment.hydra_internals import IConfigRepository
from flows.terminal.arguments import CODE


def defaults_problems(
    repository: IConfigRepository, path: str, choices: Mapping[str, Any]
) -> Iterator[tuple[str, str | None]]:
    """Yield a message and the nearest valid entry for each invalid entry in the defaults list of a user's config file,
    or of a user's file that it lists. choices: options of the groups that are chosen without the file."""
    walk = _Walk(repository, set(choices))
    walk.collect(path)
    for file, folder, entry in walk.entries:
        problem = None if Path(file).is_relative_to(CODE / "conf") else walk.problem(folder, entry)
        if problem is not None:
            yield f"{file}, defaults: '{_written(entry)}': {problem[0]}", problem[1]


class _Walk:
    """Entries of the defaults lists of a file and of the files that it lists."""

    def __init__(self, repository: IConfigRepository, chosen: set[str]):
        self.repository = repository
        self.before = chosen
        """Groups that are chosen without the file."""
        self.chosen = set(chosen)
        """Groups that are chosen by a defaults list, here or before."""
        self.entries: list[tuple[str, str, InputDefault]] = []
        self._visited: set[str] = set()

    def collect(self, path: str) -> None:
        """Collect the entries of the file and of the files that it lists."""
        if path in self._visited or not self.repository.config_exists(path):
            return
        self._visited.add(path)
        result = self.repository.load_config(path)
        if result is None:
            return
        file = f"{str(result.path).removeprefix('file://')}/{path}.yaml"
        folder = path.rpartition("/")[0]
        for entry in result.defaults_list or ():
            self.entries.append((file, folder, entry))
            if isinstance(entry, ConfigDefault):
                if entry.path is not None and entry.path != "_self_":
                    self.collect(_absolute(folder, entry.path))
            elif isinstance(entry, GroupDefault) and entry.group is not None and isinstance(entry.value, str):
                group = _absolute(folder, entry.group)
                if not entry.override:
                    self.chosen.add(group)
                self.collect(f"{group}/{entry.value}")

    def problem(self, folder: str, entry: InputDefault) -> tuple[str, str | None] | None:
        """Return the message and the nearest valid entry of an invalid entry, else None."""
        if isinstance(entry, ConfigDefault):
            return self._file_problem(folder, entry)
        if not isinstance(entry, GroupDefault) or entry.group is None or not isinstance(entry.value, str):
            return None
        if entry.optional or "${" in entry.value:
            return None
        group, name = _absolute(folder, entry.group), entry.group.lstrip("/")
        if not self.repository.group_exists(group):
            if not self.repository.group_exists(name):
                near = nearest(name, self.repository.get_group_options("", ObjectType.GROUP))
                return "there is no such group", near and self._entry(entry, near, entry.value)
            return f"without a leading / the group is {group!r}", self._entry(entry, name, entry.value)
        options = self.repository.get_group_options(group, ObjectType.CONFIG)
        if entry.value not in options:
            near = nearest(entry.value, options)
            return f"expected one of {', '.join(sorted(options))}", near and self._entry(entry, group, near)
        if entry.package is None and bool(entry.override) != (group in self.before) and group != folder:
            if not entry.override:
                return "an option of this group is already chosen", self._entry(entry, group, entry.value)
            if group not in self.chosen:
                return "no option of this group is chosen that it could replace", self._entry(entry, group, entry.value)
        if entry.package is not None and entry.override and f"{group}@{entry.package}" not in self.chosen:
            parent = entry.package.partition(".")[0]
            return f"no chosen option uses this group; first choose one that does, as '- override /{parent}: …'", None
        return None

    def _file_problem(self, folder: str, entry: ConfigDefault) -> tuple[str, str | None] | None:
        if entry.path is None or entry.path == "_self_" or entry.optional or "${" in entry.path:
            return None
        path = _absolute(folder, entry.path)
        if self.repository.config_exists(path):
            return None
        group, _, name = path.rpartition("/")
        near = nearest(name, self.repository.get_group_options(group, ObjectType.CONFIG))
        prefix = entry.path.rpartition("/")[0]
        return f"there is no file {path}.yaml", near and f"- {prefix}/{near}" if prefix else near and f"- {near}"

    def _entry(self, entry: GroupDefault, group: str, option: str) -> str:
        """Return the entry for a group of the top folder, with `override` if the group is chosen elsewhere."""
        package = f"@{entry.package}" if entry.package is not None else ""
        override = bool(entry.override) if package else group in self.before
        return f"- {'override ' if override else ''}/{group}{package}: {option}"


def _absolute(folder: str, path: str) -> str:
    """Return the path of a group or a file from the top folder."""
    return path.lstrip("/") if path.startswith("/") or not folder else f"{folder}/{path}"


def _written(entry: InputDefault) -> str:
    """Return an entry as it stands in the file."""
    if isinstance(entry, ConfigDefault):
        return f"- {entry.path}"
    assert isinstance(entry, GroupDefault)
    package = f"@{entry.package}" if entry.package is not None else ""
    return f"- {'override ' if entry.override else ''}{entry.group}{package}: {entry.value}"
