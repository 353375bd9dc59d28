"""Problems of single overrides: a key that does not exist, exists already, or cannot be set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from components.errors import Problem
from components.redaction import mask_text
from components.specs import names_below, nearest
from components.specs.wording import shortened
from flows.experiment.config_loader import Loader
from flows.experiment.flow import SHARED_KEYS, reads, unread_message
from flows.experiment.spec import ExperimentSpec
from flows.stages import PLACED, SHARDED

STAGE_NAMES = {"compute.stages": PLACED, "compute.prices": PLACED, "compute.stage_shards": SHARDED}
"""Valid keys of mappings whose keys are names of stages, by path."""


def key_problem(override: Override, config: DictConfig, groups: Mapping[str, Sequence[str]]) -> Problem | None:
    """Return the problem of the key of a single-value override, or None if the key is valid. groups: options of each
    config group."""
    key = override.key_or_group
    if override.package is not None:
        return Problem(override.get_key_element(), f"no such group {key!r}; an @ follows the name of a group")
    if override.is_add() and has_key(config, key) and not isinstance(override.value(), list | dict):
        return Problem(f"+{key}", "is already set; omit the +", (override.input_line or "").lstrip("+"))
    if override.is_delete() and has_key(config, key) and override.value() not in (None, OmegaConf.select(config, key)):
        return Problem(f"~{key}", f"the key has another value: {shortened(OmegaConf.select(config, key))}", f"~{key}")
    if override.is_hydra_override() or has_key(config, key):
        return None
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    del plain["hydra"]
    flow = plain.get("flow")
    if (
        key.partition(".")[0] in SHARED_KEYS
        and isinstance(flow, dict)
        and not reads(flow, key, allowed_packages(plain))
    ):
        return Problem(key, unread_message(flow))
    *parents, last = key.split(".")
    parent: Any = plain
    for part in parents:
        parent = parent.get(part) if isinstance(parent, dict) else None
    if isinstance(parent, dict):
        valid = names_below(ExperimentSpec, plain, parents, allowed_packages(plain))
        if override.is_delete():
            return Problem(f"~{key}", "no such key to delete", _below(parents, nearest(last, parent)))
        valid = STAGE_NAMES.get(".".join(parents), valid)
        if last in valid or not valid:  # without a list of valid keys, validation decides
            if override.is_add() or override.is_force_add():
                return None
            near = None if last in valid else nearest(last, parent)
            if near is not None:
                message = f"no such key in {'.'.join(parents)}; expected one of {', '.join(map(str, parent))}"
                return Problem(key, f"{message}, or a new key: +{override.input_line}", _below(parents, near))
            return Problem(key, "is set by no config file: add it with +", f"+{override.input_line}")
        if parents:
            message = f"no such key in {'.'.join(parents)}; expected one of {', '.join(valid)}"
            return Problem(key, message, _below(parents, nearest(last, valid)))
    if parent is None and (override.is_add() or override.is_force_add()) and _accepts_new_keys(plain, parents):
        return None
    if parents and parents[0] in groups and plain.get(parents[0], "") is None:
        options = ", ".join(option for option in groups[parents[0]] if option != "none")
        return Problem(key, f"{parents[0]} is null; expected {parents[0]}=OPTION beside it, with one of {options}")
    if parents and parent is None and has_key(config, ".".join(parents)):
        path = ".".join(parents)
        value = override.get_value_element_as_str()
        valid = names_below(ExperimentSpec, plain, parents, allowed_packages(plain))
        name = last if last in valid or not valid else nearest(last, valid)
        message = f"{path} is null: set it as a whole" + (
            f", with {', '.join(valid)}" if last not in valid and valid else ""
        )
        return Problem(key, message, name and f"{path}={{{name}: {value}}}")
    near = nearest(key, [*key_paths(plain), *groups])
    if near is not None and near in groups and not parents and isinstance(override.value(), str):
        option = nearest(override.value(), groups[near])
        sign = "" if near in config.hydra.runtime.choices else "+"
        near = f"{sign}{near}={option}" if option else near
    return Problem(key, "there is no such key", near)


def allowed_packages(data: Mapping[Any, Any]) -> list[str]:
    """Return the packages listed in `allow`; an empty list if it is not a list."""
    allow = data.get("allow")
    return [package for package in allow if isinstance(package, str)] if isinstance(allow, list) else []


def several_options(group: str, options: Sequence[Any]) -> Problem:
    """Return the problem of several options for one group, which Hydra would merge."""
    names = ",".join(map(str, options))
    text = f"[{names}]: a group has one option; to run several, sweep over them: -m {group}={names}"
    return Problem(group, text)


def _accepts_new_keys(plain: Any, parents: list[str]) -> bool:
    """Return True if the missing keys of `parents` can be added: the last existing one accepts any key."""
    node: Any = plain
    for count, part in enumerate(parents):
        if not isinstance(node.get(part), dict):
            return (
                node.get(part) is None and part not in node and not names_below(ExperimentSpec, plain, parents[:count])
            )
        node = node[part]
    return False


def _below(parents: list[str], name: str | None) -> str | None:
    return None if name is None else ".".join([*parents, name])


def apply_override(override: Override, config: DictConfig) -> Problem | None:
    """Apply an override to `config` in place. Return a problem if Hydra rejects it, else None."""
    try:
        Loader._apply_overrides_to_config([override], config)
    except HydraException as error:
        cause = error.__cause__ or error
        key = override.get_key_element()
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
            *parents, last = str(cause.full_key).split(".")
            keys = [str(name) for name in cause.parent_node]
            if not keys:
                parent = ".".join(parents)
                return Problem(key, f"{parent} has no keys yet: add them with +", f"+{parent}.{last}=VALUE")
            message = f"no such key in {'.'.join(parents)}; expected one of {', '.join(keys)}"
            return Problem(str(cause.full_key), message, _below(parents, nearest(last, keys)))
        if str(cause).startswith("Cannot merge"):  # of a list and a mapping
            listed = OmegaConf.is_list(OmegaConf.select(config, override.key_or_group))
            expected = "a list" if listed else "a mapping of keys to values"
            return Problem(key, f"{override.get_value_element_as_str()}: expected {expected}")
        return Problem(key, error_text(cause))
    return None


def has_key(config: DictConfig, key: str) -> bool:
    """Return True if the config sets the dotted key, also to null or to a missing value."""
    node: Any = config
    for part in key.split("."):
        if OmegaConf.is_list(node) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif OmegaConf.is_dict(node) and part in node.keys():  # noqa: SIM118  `in` is False for a missing value
            node = node._get_node(part)
            node = node if not OmegaConf.is_config(node) or not node._is_none() else None
        else:
            return False
    return True


def key_paths(data: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all keys of nested mappings."""
    for key, value in data.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from key_paths(value, f"{prefix}{key}.")


def error_text(error: BaseException) -> str:
    """Return the first part of an error's message in one line, with secrets masked."""
    text = str(error).partition("full_key: ")[0].partition("Config search path:")[0]
    return mask_text(" ".join(text.split())) or type(error).__name__
