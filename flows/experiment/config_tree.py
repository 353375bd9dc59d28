"""Tree of config groups and their options: what a configuration may choose, and the composition of choices.

Choices that do not exist or cannot be composed are reported as problems, and the others are composed: a misspelt option
is replaced by the nearest one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from components.errors import Problem, SpecError
from components.specs import nearest
from components.specs.wording import shortened
from flows.experiment import override_problems
from flows.experiment.config_loader import CONF, PRIMARY, Loader
from flows.experiment.defaults_problems import defaults_problems
from flows.experiment.flow import EVOLVE, SHARED_KEYS, unread_message
from flows.experiment.override_problems import error_text

EXPERIMENT = "experiment"
"""Config group of the experiments."""
COMPOSITION = (HydraException, OmegaConfBaseException, YAMLError, ValueError)
"""Exceptions that Hydra raises for configs that are inconsistent or cannot be parsed."""
MOST_COMPOSED = 64
"""Number of composed configs that a tree keeps."""
GLOBAL = "must begin with the line '# @package _global_'"
"""Requirement of a config file that sets keys of several groups."""


class ConfigTree:
    """Config groups of the project and of the user's folder, as they are when it is made."""

    def __init__(self, config_dir: str | Path | None = None):
        self.loader = Loader(config_dir, files_are_final=True)
        self.is_group = functools.cache(self._is_group)
        self._options = functools.cache(self.loader.repository.get_group_options)
        self._load = functools.lru_cache(MOST_COMPOSED)(self._compose)

    @classmethod
    def of_project(cls) -> ConfigTree:
        """Return the tree without a user's folder. The callers in a thread share it until a file or the working
        directory, which is part of a config, changes."""
        state = os.getcwd(), _file_states()
        if getattr(_OF_THREAD, "state", None) != state:
            _OF_THREAD.tree, _OF_THREAD.state = cls(), state
        tree: ConfigTree = _OF_THREAD.tree
        return tree

    def _is_group(self, key: str) -> bool:
        """Return True if the key is a config group."""
        return bool(self.loader.repository.group_exists(key))

    def options(self, group: str) -> list[str]:
        """Return the names of the options of a config group."""
        return sorted(self._options(group, ObjectType.CONFIG))

    def select(self, overrides: list[Override]) -> tuple[list[str], list[Problem], list[str]]:
        """Return the group overrides as lines to compose, with each misspelt option replaced by the nearest one; their
        problems; and the packages of the groups for which no option is near."""
        lines, problems, unsure = [], [], []
        for override in overrides:
            group = override.key_or_group
            if not self.is_group(group):
                continue
            name = override.get_key_element()
            value = override.value()
            wanted = value if isinstance(value, list) else [] if override.is_delete() and value is None else [value]
            options = self.options(group)
            wrong = [option for option in wanted if str(option) not in options]
            if not wrong and len(wanted) > 1 and not override.is_hydra_override():
                sign = "+" if group == EXPERIMENT and not override.is_add() else ""
                problems.append(override_problems.several_options(f"{sign}{name}", wanted))
                lines.append(f"{sign}{name}={wanted[0]}")
                continue
            if not wrong and group == EXPERIMENT and (path := self._without_package(str(wanted[0]))):
                problems.append(Problem(name, f"{path} {GLOBAL}"))
                continue
            if not wrong:
                lines.append(override.input_line or name)
                continue
            replaced = [near for option in wanted if (near := nearest(option, options))]
            for option in wrong:
                if misplaced := self._misplaced(group, str(option)):
                    problems.append(Problem(name, misplaced))
                    continue
                near = nearest(option, options)
                hint = f"{name}={near}" if near else None
                own = f". To use your own, write DIR/{group}/NAME.yaml and add --config-dir DIR {name}=NAME"
                text = f"{shortened(option)}: expected one of {', '.join(options)}"
                problems.append(Problem(name, text + (own if isinstance(option, dict) else ""), hint))
            if len(replaced) == len(wanted):
                lines.append(f"{name}={'[' + ','.join(replaced) + ']' if isinstance(value, list) else replaced[0]}")
            else:
                unsure.append(override.package or group.replace("/", "."))
        return lines, problems, unsure

    def _misplaced(self, group: str, option: str) -> str | None:
        """Return where an option of the user lies and where it is expected, if it is in another folder; else None."""
        folder = self.loader.folder
        if folder is None or not option or "/" in option or not (folder / f"{option}.yaml").is_file():
            return None
        if folder.name == group:
            return (
                f"{option!r}: --config-dir names the folder that holds {group}/; expected --config-dir {folder.parent}"
            )
        file, place = folder / f"{option}.yaml", folder / group / f"{option}.yaml"
        return f"{option!r}: {file} is not in the folder {group}/; move it to {place}"

    def _without_package(self, option: str) -> str | None:
        """Return the file of an experiment that lacks the header `# @package _global_`, else None."""
        try:
            result = self.loader.repository.load_config(f"{EXPERIMENT}/{option}")
        except COMPOSITION:
            return None  # composition reports the error
        if result is None or result.header.get("package") == "_global_":
            return None
        folder = str(result.path).removeprefix("file://")
        return f"{folder}/{EXPERIMENT}/{option}.yaml"

    @functools.cached_property
    def groups(self) -> dict[str, list[str]]:
        """Return the options of each config group."""
        return {group: self.options(group) for group in self.loader.list_groups("") if group != "hydra"}

    def plain(self, lines: list[str]) -> dict[str, Any]:
        """Return the composed config as plain data, without Hydra's section."""
        plain: Any = OmegaConf.to_container(self.load(lines), resolve=False)
        del plain["hydra"]
        return dict(plain)

    def compose(self, lines: list[str]) -> tuple[DictConfig, list[Problem]]:
        """Compose the lines. If that fails, compose those that work and return a problem for each of the others."""
        try:
            return self.load(lines), []
        except COMPOSITION as error:
            cause: BaseException = error
        try:
            self.load([])
        except COMPOSITION:
            raise SpecError([Problem(PRIMARY, error_text(cause))]) from cause
        used: list[str] = []
        problems = []
        for line in lines:
            try:
                self.load([*used, line])
                used.append(line)
            except COMPOSITION as error:
                key, plain = line.partition("=")[0], line.lstrip("+")
                choices = self.load(used).hydra.runtime.choices
                chosen = key.lstrip("+~") in choices
                earlier = [other for other in used if other.partition("=")[0].lstrip("+") == key.lstrip("+")]
                if line.startswith("~"):
                    option = choices.get(key.lstrip("~"))
                    message = f"the chosen option is {option!r}" if option else "no option of this group is chosen"
                    other = f"{key.lstrip('~')}={line.partition('=')[2]}"
                    problems.append(Problem(line, message, other if option else None))
                elif earlier:
                    problems.append(Problem(key, f"{earlier[-1]} chooses an option already; expected one of the two"))
                elif chosen and line.startswith("+"):
                    problems.append(Problem(key, "an option of this group is already chosen", plain))
                elif not chosen and key.lstrip("+~") in (*SHARED_KEYS, EVOLVE):
                    problems.append(Problem(key, unread_message(self.plain(used)["flow"], key)))
                elif not chosen and not line.startswith(("+", "~")):
                    problems.append(Problem(key, "no option of this group is chosen yet: add one with +", f"+{plain}"))
                else:
                    path = f"{key.lstrip('+').partition('@')[0]}/{line.partition('=')[2]}"
                    entries = list(defaults_problems(self.loader.repository, path, choices))
                    problems += [Problem(key, message, near) for message, near in entries]
                    problems += [] if entries else [Problem(key, error_text(error))]
        return self.load(used), problems

    def load(self, lines: Sequence[str]) -> DictConfig:
        """Return the composed config, which callers share and do not change. Raises one of COMPOSITION."""
        return self._load(tuple(lines))

    def _compose(self, lines: tuple[str, ...]) -> DictConfig:
        return self.loader.load_configuration(PRIMARY, list(lines), RunMode.RUN)


_OF_THREAD = threading.local()
"""Tree of the project and the state of its files. Hydra's loader and copies of configs are not safe with threads."""


def _file_states() -> frozenset[tuple[str, int, int, int]]:
    """Return path, size and times of each file of the project's configuration, without broken links."""
    states = set()
    for folder, _, names in os.walk(CONF):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                path = os.path.join(folder, name)
                status = os.stat(path)
                states.add((path, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return frozenset(states)
