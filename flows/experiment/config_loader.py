"""Hydra's config loader with two additional rules: an option chosen on the command line replaces the block as a whole,
and `size` comes last.

Hydra merges an experiment over the options of all groups, including those of the command line. For settings that is
wanted: the learning rate of an experiment stays with `algorithm=gspo`. A block of another class, however, would
silently replace the chosen option or mix with it. So if the command line chooses an option of a group, the loader
drops a block of a later file if

- it identifies itself by `_target_` or `name`, and differs from the chosen option in that;
- it is not a mapping: `warmup: null`, or an interpolation of another block;
- the files deselect the group: they set it to null in a defaults list;
- the chosen option is null, as `warmup=none`.

The file of the group `size` is merged after the experiment, and only into what the experiment has: a key that no other
file sets is left out, as is a count that is 0 or 1, and a block that is null. So one file fits all experiments.

All composition uses this loader: the checks before a run, Hydra itself, and the launchers of sweeps.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import SearchPathQuery
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from components.errors import Problem, SpecError
from flows.experiment.hydra_internals import (
    CachingConfigRepository,
    ConfigLoaderImpl,
    ConfigRepository,
    IConfigRepository,
    create_config_search_path,
    create_defaults_list,
)
from flows.terminal.arguments import CODE

CONF = CODE / "conf"
PRIMARY = "config"
SIZE = "size"
"""Config group that is merged last."""
IDENTITY = ("_target_", "name")
"""Keys that identify a block."""
_FileVersion = tuple[str, int, int, int]
"""Path, size, and times of modification and change in nanoseconds."""


class _ParsedFiles(threading.local):
    """Parsed files of a thread, by provider and folder of the source and name of the config: copies of OmegaConf's
    nodes are not safe with threads."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[str, str, str], tuple[_FileVersion, ConfigResult]] = {}


_PARSED = _ParsedFiles()


class Repository(ConfigRepository):
    """Config repository that parses a file once per thread, and again after an edit.

    Parsed files are shared: whoever merges one into a config copies it first."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        version = None if source is None else _file_version(source, config_path)
        if source is None or version is None:
            return super().load_config(config_path)
        place = (source.provider, source.path, config_path)
        known, result = _PARSED.by_place.get(place, (None, None))
        if known != version:
            result = super().load_config(config_path)
            assert result is not None
            _PARSED.by_place[place] = version, result
        return result


class Loader(ConfigLoaderImpl):
    """Config loader in which group options of the command line replace blocks of later files as a whole."""

    def __init__(self, config_dir: str | Path | None = None, *, files_are_final: bool = False):
        """Add the user's config groups in `config_dir` to the search path. files_are_final: no file changes while the
        loader is in use, so that it remembers the options that the files choose. Raises SpecError if the folder does
        not exist."""
        setup_globals()
        search_path = create_config_search_path(str(CONF))
        self.folder = None if config_dir is None else Path(config_dir).absolute()
        if self.folder is not None:
            if not self.folder.is_dir():
                raise SpecError([Problem("--config-dir", f"folder {str(self.folder)!r} does not exist")])
            search_path.prepend("command-line", f"file://{self.folder}", SearchPathQuery(provider="schema"))
        super().__init__(search_path)
        self.repository = Repository(search_path)
        self._overrides: list[Override] = []
        self._replaced: dict[int, list[_Choice]] = {}
        self._files_are_final = files_are_final
        self._choices: dict[tuple[str | None, ...], Mapping[str, Any]] = {}

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        self._overrides = parsed
        return parsed, repository

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        for group, options in _several(defaults):
            raise ConfigCompositionException(f"{group}: [{','.join(options)}]: expected one option for a group")
        sizes = [default for default in defaults if str(default.config_path).startswith(f"{SIZE}/")]
        others = [default for default in defaults if default not in sizes]
        defaults = [*others, *sizes]
        self._replaced = {}
        for choice in list(self._chosen(defaults, repo)):
            for later in defaults[choice.place + 1 :]:
                self._replaced.setdefault(id(later), []).append(choice)
        config = super()._compose_config_from_defaults_list(others, repo)
        for size in sizes:
            config.merge_with(_existing(self._load_single_config(size, repo).config, config))
        return config

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        result = super()._load_single_config(default, repo)
        assert default.config_path is not None
        if result is repo.load_config(default.config_path):  # of the global package, which embeds no copy
            result = copy.copy(result)
            result.config = copy.deepcopy(result.config)
        for choice in self._replaced.get(id(default), ()):
            if choice.replaces(_node(result.config, choice.package)):
                parents, _, last = choice.package.rpartition(".")
                del _node(result.config, parents)[last]
        return result

    def _chosen(self, defaults: list[ResultDefault], repo: IConfigRepository) -> Iterator[_Choice]:
        changes = [override for override in self._overrides if _chooses(override, repo)]
        if not changes:
            return
        others = [override for override in self._overrides if override not in changes]
        lines = tuple(override.input_line for override in others)
        if lines not in self._choices or not self._files_are_final:
            self._choices[lines] = _choices(repo, others)
        choices = self._choices[lines]
        for override in changes:
            key, option = override.get_key_element().lstrip("+"), str(override.value())
            package = override.package or override.key_or_group.replace("/", ".")
            paths = {f"{override.key_or_group}/{option}"}
            place = None
            for index, default in enumerate(defaults):
                below = default.package in ("", package) or str(default.package).startswith(f"{package}.")
                if below and (default.config_path in paths or default.parent in paths):
                    place = index
                    paths.add(str(default.config_path))
            if place is not None:
                node = _node(self._load_single_config(defaults[place], repo).config, package)
                whole = _is_null(node) or choices.get(key, "") is None
                yield _Choice(package, place, whole, None if choices.get(key) != option else _identity(node))


def _choices(repo: IConfigRepository, overrides: list[Override]) -> Mapping[str, Any]:
    """Return the option of each group that the files and these overrides choose; none if they need another option to
    compose."""
    try:
        return create_defaults_list(
            repo, PRIMARY, overrides, prepend_hydra=True, skip_missing=True
        ).overrides.known_choices
    except ConfigCompositionException:
        return {}


@dataclass(frozen=True)
class _Choice:
    """Group option chosen on the command line."""

    package: str
    """Package of the option."""
    place: int
    """Index of the option's last file in the defaults list."""
    whole: bool
    """True if all keys of later files for the package are dropped."""
    own: dict[str, Any] | None
    """Identity of the option (see IDENTITY) if the files choose the same option; None if they choose another."""

    def replaces(self, block: Any) -> bool:
        """Return True if a block of a later file is dropped."""
        if block is None:
            return False
        if self.whole or not _is_mapping(block):
            return True
        identity = _identity(block)
        if self.own is None:
            return bool(identity)
        return any(self.own.get(key, value) != value for key, value in identity.items())


def _file_version(source: ConfigSource, config_path: str) -> _FileVersion | None:
    """Return what identifies the content of a config: the path, size and times of its file. None for a config without
    a file. The configs of installed packages do not change while the process runs."""
    if source.scheme() == "pkg":
        return source.path, 0, 0, 0
    if source.scheme() != "file":
        return None
    path = os.path.realpath(os.path.join(source.path, source._normalize_file_name(config_path)))
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _existing(changes: DictConfig, config: DictConfig) -> DictConfig:
    """Return the changes of keys that the config has, without counts that are 0 or 1 and blocks that are null."""
    existing: dict[str, Any] = {}
    for key, change in changes.items_ex(resolve=False):
        node = config._get_node(key) if key in config.keys() else None  # noqa: SIM118  `in` is False for a missing value
        if node is None or (_is_mapping(change) and not _is_mapping(node)):
            continue
        if isinstance(node, DictConfig) and _is_mapping(change):
            existing[str(key)] = _existing(change, node)
        elif not _is_smallest(node):
            existing[str(key)] = change
    return OmegaConf.create(existing)


def _is_smallest(node: Any) -> bool:
    """Return True for the count 0, which switches something off, and for 1, such as the turns of a single answer."""
    return not OmegaConf.is_config(node) and type(node._value()) is int and node._value() in (0, 1)


def _several(defaults: list[ResultDefault]) -> Iterator[tuple[str, list[str]]]:
    """Yield each group with several options in a defaults list, which Hydra would merge. Files for the global package
    do not count."""
    options_of: dict[tuple[Any, ...], list[str]] = {}
    for default in defaults:
        group, _, option = str(default.config_path).rpartition("/")
        if group and default.package and not f"{group}/".startswith("hydra/"):
            options_of.setdefault((group, default.package, default.parent), []).append(option)
    yield from ((group, options) for (group, _, _), options in options_of.items() if len(set(options)) > 1)


def _chooses(override: Override, repository: IConfigRepository) -> bool:
    """Return True if an override chooses a group option for a package. A file added to the global package, as
    `+experiment=NAME`, does not count."""
    if override.is_delete() or override.is_sweep_override() or override.is_hydra_override():
        return False
    if override.is_add() and override.package is None:
        return False
    return isinstance(override.value(), str) and bool(repository.group_exists(override.key_or_group))


def _node(config: Any, path: str) -> Any:
    """Return the node at a path without resolving interpolations; None if it does not exist."""
    for part in path.split(".") if path else ():
        if not _is_mapping(config):
            return None
        config = config._get_node(part)
    return config


def _is_mapping(node: Any) -> bool:
    return OmegaConf.is_dict(node) and not (_is_null(node) or node._is_interpolation() or node._is_missing())


def _is_null(node: Any) -> bool:
    return node is not None and bool(node._is_none())


def _identity(node: Any) -> dict[str, Any]:
    """Return the identifying keys of a block that are set, with their values."""
    nodes = {key: node._get_node(key) for key in IDENTITY} if _is_mapping(node) else {}
    return {key: child._value() for key, child in nodes.items() if child is not None and not child._is_missing()}
