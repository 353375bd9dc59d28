"""Hydra's config loader with one rule added: an option that the command line chooses wins whole.

Hydra merges an experiment over the options of all groups, also over those of the command line. For settings that is
wanted: the learning rate of an experiment stays with `algorithm=gspo`. A block that describes another thing, however,
would replace the chosen one in silence or mix with it. So where the command line chooses an option of a group, a block
of a later file is left out if

- it says by itself what it is, by `_target_` or `name`, and that is not the option that is chosen;
- it is no mapping: `warmup: null`, or a reference to another block;
- the files write the group out: they set it to null in a defaults list;
- the chosen option is null, as `warmup=none`.

Everything that composes uses this loader: the checks before a run, Hydra itself, and the launchers of sweeps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from components.errors import Problem, SpecError
from flows.experiment.spec import CODE

CONF = CODE / "conf"
PRIMARY = "config"
IDENTITY = ("_target_", "name")
"""Keys by which a block says what it is."""


class Loader(ConfigLoaderImpl):
    """Composes configs; groups that the command line chooses win whole."""

    def __init__(self, config_dir: str | Path | None = None):
        """config_dir: folder of the user's config groups. Raises SpecError where it does not exist."""
        setup_globals()
        search_path = create_config_search_path(str(CONF))
        if config_dir is not None:
            folder = Path(config_dir).absolute()
            if not folder.is_dir():
                raise SpecError([Problem("--config-dir", f"there is no folder {str(folder)!r}")])
            search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
        super().__init__(search_path)
        self._overrides: list[Override] = []
        self._replaced: dict[int, list[_Choice]] = {}

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        self._overrides = parsed
        return parsed, repository

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        for group, options in _several(defaults):
            raise ConfigCompositionException(f"{group}: [{','.join(options)}]: a group has one option")
        self._replaced = {}
        for choice in list(self._chosen(defaults, repo)):
            for later in defaults[choice.place + 1 :]:
                self._replaced.setdefault(id(later), []).append(choice)
        return super()._compose_config_from_defaults_list(defaults, repo)

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        result = super()._load_single_config(default, repo)
        for choice in self._replaced.get(id(default), ()):
            if choice.replaces(_node(result.config, choice.package)):
                result = copy.copy(result)
                result.config = copy.deepcopy(result.config)  # the repository caches it
                parents, _, last = choice.package.rpartition(".")
                del _node(result.config, parents)[last]
        return result

    def _chosen(self, defaults: list[ResultDefault], repo: IConfigRepository) -> Iterator[_Choice]:
        changes = [one for one in self._overrides if _chooses(one, repo)]
        if not changes:
            return
        others = [one for one in self._overrides if one not in changes]
        try:
            before = create_defaults_list(repo, PRIMARY, others, prepend_hydra=True, skip_missing=True)
        except ConfigCompositionException:  # an option of the command line is what the files lack
            choices: dict[str, Any] = {}
        else:
            choices = before.overrides.known_choices
        for one in changes:
            key, option = one.get_key_element().lstrip("+"), str(one.value())
            package = one.package or one.key_or_group.replace("/", ".")
            inside = {f"{one.key_or_group}/{option}"}
            place = None
            for at, default in enumerate(defaults):
                below = default.package in ("", package) or str(default.package).startswith(f"{package}.")
                if below and (default.config_path in inside or default.parent in inside):
                    place = at
                    inside.add(str(default.config_path))
            if place is not None:
                node = _node(self._load_single_config(defaults[place], repo).config, package)
                whole = _is_null(node) or choices.get(key, "") is None
                yield _Choice(package, place, whole, None if choices.get(key) != option else _identity(node))


@dataclass(frozen=True)
class _Choice:
    """An option that the command line chooses."""

    package: str
    """Where it is put."""
    place: int
    """Index of the last file that belongs to it in the defaults list."""
    whole: bool
    """Whether everything that later files say of the package is left out."""
    own: dict[str, Any] | None
    """What the option says that it is, where the files choose it too; None where they choose another."""

    def replaces(self, block: Any) -> bool:
        """Return whether a block of a later file is left out."""
        if block is None:
            return False
        if self.whole or not _is_mapping(block):
            return True
        said = _identity(block)
        return bool(said) if self.own is None else any(self.own.get(key, value) != value for key, value in said.items())


def _several(defaults: list[ResultDefault]) -> Iterator[tuple[str, list[str]]]:
    """Yield the groups of which a defaults list takes several options, each of which would be laid over those before
    it. Files for the whole configuration are no such options."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for default in defaults:
        group, _, option = str(default.config_path).rpartition("/")
        if group and default.package and not f"{group}/".startswith("hydra/"):
            found.setdefault((group, default.package, default.parent), []).append(option)
    yield from ((group, options) for (group, _, _), options in found.items() if len(set(options)) > 1)


def _chooses(override: Override, repository: IConfigRepository) -> bool:
    """Return whether an override chooses an option for a package. A file that is added to the whole configuration, as
    `+experiment=NAME`, does not."""
    if override.is_delete() or override.is_sweep_override() or override.is_hydra_override():
        return False
    if override.is_add() and override.package is None:
        return False
    return isinstance(override.value(), str) and bool(repository.group_exists(override.key_or_group))


def _node(config: Any, path: str) -> Any:
    """Return the node at a path, resolving nothing; None where it does not exist."""
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
    """Return what a block says that it is, as far as it is set."""
    found = {key: node._get_node(key) for key in IDENTITY} if _is_mapping(node) else {}
    return {key: one._value() for key, one in found.items() if one is not None and not one._is_missing()}
