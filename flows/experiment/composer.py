"""Composer of Hydra configs that reports invalid overrides as problems.

Groups, options and keys of an override must exist in the config tree (`flows.experiment.config_tree`).

A group option on the command line replaces the experiment's block as a whole (`flows.experiment.config_loader`). Keys
that the experiment sets for its own option remain. Those that the chosen option does not have are rejected; the message
names the override that removes them.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from components.errors import Problem, SpecError
from components.redaction import Secret, is_secret, secrets_in
from components.redaction.data import problems as secret_problems
from components.specs import names_below, nearest
from flows.experiment import override_problems
from flows.experiment.config_tree import EXPERIMENT, GLOBAL, ConfigTree
from flows.experiment.override_problems import allowed_packages, error_text, has_key, key_paths
from flows.experiment.spec import ExperimentSpec
from flows.terminal import overrides as override_lines

UNNAMED = "experiment"
"""Default run name in `conf/config.yaml`, which experiments override."""
CLOSE = 0.7
"""Lowest similarity of a key that is suggested for a word alone, which need not be a key at all."""
MOST_POINTS = 64
"""Maximum number of sweep points validated in full; in a larger sweep each value is validated separately."""
MOST_VALUES = 1000
"""Maximum number of values of one key that are validated."""
_FORMS = """a list as key=[1,2], a mapping as key={a: 1}, text with special characters in quotes: 'key="a b"'"""
_OTHER_SIGN = re.compile(
    r"(?P<sign>[+~]?)(?P<key>[A-Za-z_][\w./@]{0,200})(?:(?:==|:|\s)\s{0,9}(?P<value>[\w./-]{1,200}))?"
)
"""Override without `=`, or with another sign in its place."""
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
"""Value of a key that is that of another key."""
_FROM_ENVIRONMENT = re.compile(r"oc\.env:\s{0,9}[\"']?(\w+)")

HYDRA_MAY_CALL = {
    "_target_": ("hydra.experimental.", "hydra_plugins."),
    "class": ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter"),
    "()": ("logging.Formatter", "colorlog.ColoredFormatter"),
}
"""Classes and packages that Hydra's own config may name, by key."""


@dataclass(frozen=True)
class Sweep:
    """Hydra settings and overrides of a sweep."""

    hydra: dict[str, Any]
    """Sweeper and launcher settings of the composed config."""
    overrides: list[Override]
    """Overrides of the sweeper's `params`, followed by those of the command line."""
    seeds: list[str]
    """Overrides that take the place of `seeds`; empty without it."""


class Composer:
    """Composer of configs that reports invalid overrides as problems."""

    def __init__(self, config_dir: str | Path | None = None):
        self.tree = ConfigTree.of_project() if config_dir is None else ConfigTree(config_dir)
        self.parser = OverridesParser.create(self.tree.loader)

    def parse(self, lines: Sequence[str]) -> tuple[list[Override], list[Problem]]:
        """Return the parsed overrides, and problems of the lines that cannot be parsed."""
        overrides, problems = [], []
        experiment_is_chosen = any(line.lstrip("+~").startswith(f"{EXPERIMENT}=") for line in lines)
        for line in lines:
            try:
                overrides.append(self.parser.parse_override(line))
            except HydraException:
                problems.append(self._unreadable(line, experiment_is_chosen))
                continue
            if not overrides[-1].key_or_group:
                problems.append(Problem(line, "has no key; expected key=value"))
                overrides.pop()
        return overrides, problems

    def _unreadable(self, line: str, experiment_is_chosen: bool) -> Problem:
        """Return the problem of an override that Hydra's grammar rejects."""
        if not (match := _OTHER_SIGN.fullmatch(line)):
            return Problem(line, f"cannot be parsed: expected key=value, {_FORMS}")
        sign, key, value = match["sign"], match["key"], match["value"]
        name = key.partition("@")[0]
        if value:
            exists = self.tree.is_group(name) or has_key(self.tree.load([]), name)
            return Problem(line, "cannot be parsed: expected key=value", f"{sign}{key}={value}" if exists else None)
        if self.tree.is_group(name):
            options = ", ".join(self.tree.options(name))
            return Problem(line, f"has no option; expected {sign}{key}=OPTION, one of {options}")
        if has_key(self.tree.load([]), name):
            return Problem(line, f"has no value; expected {sign}{key}=VALUE")
        choices = self.tree.load([]).hydra.runtime.choices
        experiments = () if experiment_is_chosen else self.tree.options(EXPERIMENT)
        if name in experiments:
            return Problem(line, "is the name of an experiment", f"+{EXPERIMENT}={name}")
        groups = {group: options for group, options in self.tree.groups.items() if group in choices}
        lines = [f"{group}={name}" for group, options in groups.items() if name in options]
        if lines:
            return Problem(line, f"is the name of an option; expected {' or '.join(lines)}")
        message = "has no value, and the key does not exist; expected key=value"
        near = nearest(name, [*key_paths(self.tree.plain([])), *groups], cutoff=CLOSE)
        if near is None and (experiment := nearest(name, experiments, cutoff=CLOSE)):
            return Problem(line, message, f"+{EXPERIMENT}={experiment}")
        return Problem(line, message, near and f"{near}={'OPTION' if near in groups else 'VALUE'}")

    def several_experiments(self, overrides: list[Override]) -> tuple[list[Override], list[Problem]]:
        """Return the overrides without those that choose a second experiment, and their problem."""
        chosen = [
            override for override in overrides if override.key_or_group == EXPERIMENT and not override.is_delete()
        ]
        if len(chosen) < 2:
            return overrides, []
        names = ",".join(override.get_value_element_as_str() for override in chosen)
        message = f"{names}: a run has one experiment; to run each of them, sweep: -m +{EXPERIMENT}={names}"
        remaining = [override for override in overrides if override not in chosen[1:]]
        return remaining, [Problem(f"+{EXPERIMENT}", message)]

    def chooses_experiment(self, overrides: list[Override]) -> bool:
        """Return True if the overrides or a primary config of the user choose an experiment."""
        config = self.tree.compose(self.tree.select(overrides)[0])[0]
        by_override = any(override.key_or_group == EXPERIMENT for override in overrides)
        return by_override or config.hydra.runtime.choices.get(EXPERIMENT) is not None

    def no_experiment(self) -> Problem:
        """Return the problem of a configuration without an experiment."""
        names = ", ".join(self.tree.options(EXPERIMENT))
        text = f"no experiment is chosen; expected +experiment=NAME, one of {names}, or name=NAME to run the defaults"
        return Problem("+experiment", text)

    def traced(self, problem: Problem, overrides: list[Override], data: dict[str, Any]) -> Problem:
        """Return a validation problem. If a config file sets a key that the option chosen on the command line does not
        have, add the override that removes the key."""
        *parents, last = problem.path.split(".")
        valid = names_below(ExperimentSpec, data, parents, allowed_packages(data))
        if not valid or last in valid:
            return problem
        chosen = [
            override.package or override.key_or_group.replace("/", ".")
            for override in overrides
            if self.tree.is_group(override.key_or_group)
        ]
        keys = [override.key_or_group for override in overrides if not self.tree.is_group(override.key_or_group)]
        config = self.tree.compose(self.tree.select(overrides)[0])[0]
        if (
            not any(problem.path.startswith(f"{package}.") for package in chosen)
            or any(f"{problem.path}.".startswith(f"{key}.") for key in keys)
            or not has_key(config, problem.path)
        ):
            return problem
        name = config.hydra.runtime.choices.get(EXPERIMENT)
        others = [override for override in overrides if override.key_or_group != EXPERIMENT]
        by_experiment = name and not has_key(self.tree.compose(self.tree.select(others)[0])[0], problem.path)
        setter = f"+experiment={name} sets it for another option" if by_experiment else "a config file sets it"
        return Problem(problem.path, f"{problem.message}. {setter}; add '~{problem.path}' to remove it")

    def without_copies(self, problems: Sequence[Problem], overrides: list[Override]) -> list[Problem]:
        """Return the problems without those of keys that a config file sets to the value of another key with a problem,
        as `compute.stages.judge: ${compute.default}`."""
        config = self.tree.compose(self.tree.select(overrides)[0])[0]
        config = copy.deepcopy(config)
        for override in overrides:
            if not self.tree.is_group(override.key_or_group):
                override_problems.apply_override(override, config)
        plain: Any = OmegaConf.to_container(config, resolve=False)
        wrong = {problem.path for problem in problems}
        return [problem for problem in problems if _copied_from(plain, problem.path) not in wrong]

    def sweep(self, parsed: list[Override], multirun: bool, problems: list[Problem]) -> Sweep | None:
        """Return the sweep if `multirun` or `hydra.mode` requests one, else None. Adds to `problems`."""
        fixed = [override for override in parsed if not override.is_sweep_override()]
        config = self.tree.compose(self.tree.select(fixed)[0])[0]
        settings = [
            override
            for override in fixed
            if override.key_or_group == "seeds"
            or (override.is_hydra_override() and not self.tree.is_group(override.key_or_group))
        ]
        if settings:
            config = copy.deepcopy(config)
        for override in settings:
            override_problems.apply_override(override, config)
        self._refuse_hydra_secrets(config)
        seeds = _seed_overrides(OmegaConf.select(config, "seeds"))
        if not multirun and OmegaConf.select(config, "hydra.mode") != RunMode.MULTIRUN and not seeds:
            return None
        params = OmegaConf.select(config, "hydra.sweeper.params") or {}
        lines = [f"{key}={value}" for key, value in params.items()]
        override_lines.refuse_secrets(lines)
        swept, parse_problems = self.parse(lines)
        problems += parse_problems
        if seeds:
            if any(override.key_or_group == "seed" for override in [*swept, *parsed]):
                problems.append(Problem("seeds", "is set together with seed; set one of them"))
            parsed = [override for override in parsed if override.key_or_group != "seeds"]
            parsed += [self.parser.parse_override(line) for line in seeds]
        parsed = list({override.get_key_element(): override for override in [*swept, *parsed]}.values())
        parts = {name: OmegaConf.to_container(config.hydra[name], resolve=False) for name in ("sweeper", "launcher")}
        return Sweep(parts, parsed, seeds)

    def points(self, parsed: list[Override], sweeps: bool, problems: list[Problem]) -> Iterator[list[Override]]:
        """Return the overrides of each point of a sweep; a single point if they do not sweep. Adds to `problems`."""
        if not sweeps:
            sweeping = [override.get_key_element() for override in parsed if override.is_sweep_override()]
            problems += [Problem(name, "has several values; to sweep over them, add -m") for name in sweeping]
            parsed = [override for override in parsed if not override.is_sweep_override()]
        axes = [self._axis(override) for override in parsed]
        empty = [override.get_key_element() for override, axis in zip(parsed, axes, strict=True) if not axis]
        problems += [Problem(name, "sweeps over an empty list; expected at least one value") for name in empty]
        if len(list(itertools.islice(itertools.product(*axes), MOST_POINTS + 1))) <= MOST_POINTS:
            return map(list, itertools.product(*axes))
        first = [axis[0] for axis in axes]
        return ([*first[:i], value, *first[i + 1 :]] for i, axis in enumerate(axes) for value in axis)

    def _axis(self, override: Override) -> list[Override]:
        if not override.is_sweep_override():
            return [override]
        if override.is_discrete_sweep():
            values = list(itertools.islice(override.sweep_string_iterator(), MOST_VALUES))
        else:
            sweep = override.value()
            assert isinstance(sweep, IntervalSweep)
            values = [str(sweep.start), str(sweep.end)]
        return [self.parser.parse_override(f"{override.get_key_element()}={value}") for value in values]

    def point(self, overrides: list[Override]) -> tuple[dict[str, Any] | None, list[Problem]]:
        """Return the data of one point, composed of its valid overrides, and the problems of the others. The data is
        None if an interpolation fails."""
        lines, problems, unsure = self.tree.select(overrides)
        config, composition_problems = self.tree.compose(lines)
        problems += composition_problems
        config = copy.deepcopy(config)
        for override in overrides:
            key = override.key_or_group
            package = override.package or key.replace("/", ".")
            is_group = self.tree.is_group(key)
            if override.is_delete() and is_group and not composition_problems and has_key(config, package):
                message = f"removes the option, but not the keys that the experiment sets; expected {key}=OPTION"
                none = f"{key}=none" if "none" in self.tree.options(key) else None
                problems.append(Problem(override.get_key_element(), message, none))
            if is_group or any(key == group or key.startswith(group + ".") for group in unsure):
                continue
            problem = override_problems.key_problem(
                override, config, self.tree.groups
            ) or override_problems.apply_override(override, config)
            if problem is not None:
                problems.append(problem)
        problems += _foreign_code(config["hydra"])
        self._refuse_hydra_secrets(config)
        with open_dict(config):
            del config["hydra"]
        _refuse(_interpolated(OmegaConf.to_container(config, resolve=False)))
        try:
            data: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)  # type: ignore[assignment]
            _refuse(secrets_in(data))
        except OmegaConfBaseException as error:
            return None, [*problems, Problem(str(getattr(error, "full_key", "") or "config"), error_text(error))]
        if "experiment" in data:
            del data["experiment"]
            problems.append(Problem("+experiment", f"a config file in its defaults list {GLOBAL}"))
        return data, problems

    def _refuse_hydra_secrets(self, config: DictConfig) -> None:
        """Raise SpecError for secrets in Hydra's section, which Hydra writes to disk and passes to its plugins."""
        hydra: Any = OmegaConf.to_container(config.hydra, resolve=False)
        hydra = {name: part for name, part in hydra.items() if name not in ("overrides", "runtime", "help")}
        _refuse([*_interpolated(hydra, "hydra"), *secrets_in(hydra, "hydra")])


def _copied_from(data: Any, path: str) -> str | None:
    """Return the key whose value a key takes by an interpolation; None if it has a value of its own."""
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    match = _INTERPOLATION.fullmatch(data) if isinstance(data, str) else None
    return match[1] if match else None


def _seed_overrides(seeds: Any) -> list[str]:
    """Return the overrides that sweep over the values of `seeds`; none without a valid list."""
    if not isinstance(seeds, ListConfig) or not len(seeds) or not all(type(seed) is int for seed in seeds):
        return []
    return ["seeds=null", "seed=" + ",".join(map(str, dict.fromkeys(seeds)))]


def _refuse(secrets: Sequence[Secret]) -> None:
    if secrets:
        raise SpecError(secret_problems(secrets))


def _interpolated(value: Any, path: str = "") -> list[Secret]:
    """Return secrets that an interpolation such as `${oc.env:HF_TOKEN}` would copy from the environment."""
    if isinstance(value, dict):
        items = ((f"{path}.{name}" if path else str(name), item) for name, item in value.items())
        return [secret for below, item in items for secret in _interpolated(item, below)]
    if isinstance(value, list):
        return [secret for item in value for secret in _interpolated(item, path)]
    names = _FROM_ENVIRONMENT.findall(value) if isinstance(value, str) else []
    if any(is_secret(name) for name in names) or (names and is_secret(path)):
        return [Secret(path, "an interpolation that copies a secret from the environment")]
    return []


def _foreign_code(config: DictConfig) -> Iterator[Problem]:
    """Yield a problem for each class or function in Hydra's config that is not allowed: Hydra would import and call
    callbacks, and logging factories and classes, before the spec is validated. Launchers and sweepers must be installed
    as plugins; Hydra itself rejects others."""
    for part in ("callbacks", "job_logging", "hydra_logging"):
        node = config.get(part)
        plain = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
        for path, name in _called(plain, f"hydra.{part}"):
            allowed = HYDRA_MAY_CALL[path.rpartition(".")[2]]
            if not any(name == entry or (entry.endswith(".") and str(name).startswith(entry)) for entry in allowed):
                message = f"Hydra would call {name!r} before validation; expected {', '.join(allowed)}, or omit the key"
                yield Problem(path, message)


def _called(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the names in a section of Hydra's config that Hydra imports and calls, with their key paths."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if key in HYDRA_MAY_CALL:
            yield f"{path}.{key}", value
        yield from _called(value, f"{path}.{key}")
