"""From overrides to validated specs: Hydra composes, and every mistake is found before it starts.

Hydra stops at the first override that it cannot use, and knows nothing of the specs. So overrides are looked at one by
one against the config tree: is it a group, is there such an option, is there such a key; what is right is composed and
validated, and all problems are reported as one `SpecError`. Where a group option is misspelt, the rest is checked as if
the nearest one had been meant.

A sweep is checked point by point, as far as its points are known beforehand; of a continuous range, the ends.

What the command line chooses for a group wins whole (`flows.experiment.config_loader`). Keys that an experiment sets
for the option that it had chosen itself stay; those that the chosen option does not have are refused, with the override
that leaves them out.

Secrets are looked for first: in each override as it was given, and in each composed configuration. Where there is one,
nothing else is reported, so that no other message repeats it.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from components.errors import Problem, SpecError
from components.redaction import Secret, is_secret, mask_text, secrets_in
from components.redaction.data import problems as secret_problems
from components.specs import names_below, nearest, validate
from flows.experiment import sweep_settings
from flows.experiment.config_loader import PRIMARY, Loader
from flows.experiment.foreign_code import foreign_code
from flows.experiment.spec import ExperimentSpec
from flows.terminal import overrides as override_lines

EXPERIMENT = "experiment"
"""Group of the experiments."""
UNNAMED = "experiment"
"""Name of a run in `conf/config.yaml`, which experiments replace."""
COMPOSITION = (HydraException, OmegaConfBaseException, YAMLError, ValueError)
"""What Hydra raises where configs do not fit together or cannot be read."""
_GLOBAL = "has to begin with the line '# @package _global_'"
_FORMS = """a list as key=[1,2], a mapping as key={a: 1}, text with special characters in quotes: 'key="a b"'"""
_OTHER_SIGN = re.compile(
    r"(?P<sign>[+~]?)(?P<key>[A-Za-z_][\w./@]{0,200})(?:(?:==|:|\s)\s{0,9}(?P<value>[\w./-]{1,200}))?"
)
"""An override without its `=`, or with another sign in its place."""
_FROM_ENVIRONMENT = re.compile(r"oc\.env:\s{0,9}[\"']?(\w+)")
MOST_POINTS = 64
"""Points of a sweep that are checked in all combinations; of more, each value is checked by itself."""

MOST_VALUES = 1000
"""Values of one key that are checked."""


def compose(overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> ExperimentSpec:
    """The spec of one run. `config_dir` is a folder of your own config groups. Raises SpecError."""
    return check(overrides, config_dir=config_dir)[0]


def check(
    overrides: Sequence[str], *, multirun: bool = False, config_dir: str | Path | None = None, named: bool = False
) -> list[ExperimentSpec]:
    """The specs of all points that the overrides describe; one, unless they sweep.

    named: refuses a configuration of the defaults alone, which has no experiment and no name of its own. Raises
    SpecError with every problem of every point.
    """
    return looked_at(overrides, multirun=multirun, config_dir=config_dir, named=named)[0]


def looked_at(
    overrides: Sequence[str], *, multirun: bool = False, config_dir: str | Path | None = None, named: bool = False
) -> tuple[list[ExperimentSpec], Sweep | None]:
    """What `check` returns, and the sweep, where the overrides describe one."""
    composer = Composer(config_dir)
    override_lines.refuse_secrets(overrides)
    parsed, problems = composer.parse(overrides)
    sweep = composer.sweep(parsed, multirun, problems)
    points = composer.points(sweep.overrides if sweep else parsed, sweep is not None, problems)
    specs = []
    for point in points:
        data, found = composer.point(point)
        if data is not None:
            if named and data.get("name") == UNNAMED and not composer.chooses_experiment(point):
                found.append(composer.no_experiment())
            try:
                specs.append(validate(ExperimentSpec, data))
            except SpecError as error:
                seen = {problem.path for problem in found}
                found += [composer.traced(one, point, data) for one in error.problems if one.path not in seen]
        problems += [problem for problem in found if problem not in problems]
    if sweep is not None:
        problems += sweep_settings.problems(sweep.hydra, sweep.overrides, specs)
    if problems:
        raise SpecError(problems)
    return specs, sweep


def check_secrets(overrides: Sequence[str], *, multirun: bool = False, config_dir: str | Path | None = None) -> None:
    """Raise SpecError where the configuration holds a secret, and for nothing else: before Hydra prints of it."""
    override_lines.refuse_secrets(overrides)
    composer = Composer(config_dir)
    parsed, ignored = composer.parse(overrides)
    sweep = composer.sweep(parsed, multirun, ignored)
    for point in composer.points(sweep.overrides if sweep else parsed, sweep is not None, ignored):
        composer.point(point)


def missing_keys(keys: Sequence[str], overrides: Sequence[str], *, config_dir: str | Path | None = None) -> list[str]:
    """Return those of the keys that are neither a config group nor set by the config that the overrides compose."""
    composer = Composer(config_dir)
    data, _ = composer.point(composer.parse(overrides)[0])
    config = OmegaConf.create(data or {})
    return [key for key in keys if not (composer.is_group(key.partition("@")[0]) or _has(config, key))]


@dataclass(frozen=True)
class Sweep:
    """What is swept, and how."""

    hydra: dict[str, Any]
    """Hydra's part of the composed config."""
    overrides: list[Override]
    """Those of the command line, and before them what the sweeper's `params` say."""


class Composer:
    """Composes configs and says what is wrong with overrides."""

    def __init__(self, config_dir: str | Path | None = None):
        self.loader = Loader(config_dir)
        self.parser = OverridesParser.create(self.loader)
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def parse(self, lines: Sequence[str]) -> tuple[list[Override], list[Problem]]:
        overrides, problems = [], []
        for line in lines:
            try:
                overrides.append(self.parser.parse_override(line))
            except HydraException:
                problems.append(self._unreadable(line))
                continue
            if not overrides[-1].key_or_group:
                problems.append(Problem(line, "has no key; expected key=value"))
                overrides.pop()
        return overrides, problems

    def _unreadable(self, line: str) -> Problem:
        """What is wrong with an override that Hydra's grammar does not know."""
        if not (found := _OTHER_SIGN.fullmatch(line)):
            return Problem(line, f"cannot be read: expected key=value, {_FORMS}")
        sign, key, value = found["sign"], found["key"], found["value"]
        name = key.partition("@")[0]
        if value:
            known = self.is_group(name) or _has(self._load([]), name)
            return Problem(line, "cannot be read: expected key=value", f"{sign}{key}={value}" if known else None)
        if self.is_group(name):
            options = ", ".join(self._options(name))
            return Problem(line, f"has no option; expected {sign}{key}=OPTION, one of {options}")
        if _has(self._load([]), name):
            return Problem(line, f"has no value; expected {sign}{key}=VALUE")
        near = nearest(name, [*_keys(self._plain([])), *self._own_groups()])
        return Problem(line, "has no value, and there is no such key; expected key=value", near and f"{near}=VALUE")

    def chooses_experiment(self, overrides: list[Override]) -> bool:
        """Return whether an experiment is chosen, by the overrides or by a primary config of the user."""
        files = self._config(self._groups(overrides)[0])[0]
        by_hand = any(override.key_or_group == EXPERIMENT for override in overrides)
        return by_hand or files.hydra.runtime.choices.get(EXPERIMENT) is not None

    def no_experiment(self) -> Problem:
        """Return the problem of a configuration of the defaults alone."""
        names = ", ".join(self._options(EXPERIMENT))
        text = f"none is chosen; expected +experiment=NAME with one of {names}, or name=NAME for a run of the defaults"
        return Problem("+experiment", text)

    def traced(self, problem: Problem, overrides: list[Override], data: dict[str, Any]) -> Problem:
        """Return a problem of validation, with the override that helps where a file sets a key that an option of the
        command line does not have."""
        *parents, last = problem.path.split(".")
        valid = names_below(ExperimentSpec, data, parents, _allowed(data))
        if not valid or last in valid:
            return problem
        chosen = [
            override.package or override.key_or_group.replace("/", ".")
            for override in overrides
            if self.is_group(override.key_or_group)
        ]
        given = [override.key_or_group for override in overrides if not self.is_group(override.key_or_group)]
        files = self._config(self._groups(overrides)[0])[0]
        if (
            not any(problem.path.startswith(f"{package}.") for package in chosen)
            or any(f"{problem.path}.".startswith(f"{key}.") for key in given)
            or not _has(files, problem.path)
        ):
            return problem
        name = files.hydra.runtime.choices.get(EXPERIMENT)
        setter = f"+experiment={name} sets it for another option" if name else "a config file sets it"
        return Problem(problem.path, f"{problem.message}. {setter}; expected '~{problem.path}', which leaves it out")

    def sweep(self, parsed: list[Override], multirun: bool, problems: list[Problem]) -> Sweep | None:
        """The sweep, where one is asked for by `multirun` or by `hydra.mode`."""
        fixed = [override for override in parsed if not override.is_sweep_override()]
        config = copy.deepcopy(self._config(self._groups(fixed)[0])[0])
        for override in fixed:
            if override.is_hydra_override() and not self.is_group(override.key_or_group):
                _apply(override, config)
        self._refuse_of_hydra(config)
        if not multirun and OmegaConf.select(config, "hydra.mode") != RunMode.MULTIRUN:
            return None
        params = OmegaConf.select(config, "hydra.sweeper.params") or {}
        lines = [f"{key}={value}" for key, value in params.items()]
        override_lines.refuse_secrets(lines)
        more, broken = self.parse(lines)
        problems += broken
        parsed = list({override.get_key_element(): override for override in [*more, *parsed]}.values())
        parts = {name: OmegaConf.to_container(config.hydra[name], resolve=False) for name in ("sweeper", "launcher")}
        return Sweep(parts, parsed)

    def points(self, parsed: list[Override], sweeps: bool, problems: list[Problem]) -> Iterator[list[Override]]:
        """The overrides of each point of a sweep; themselves, where they sweep over nothing."""
        if not sweeps:
            sweeping = [override.get_key_element() for override in parsed if override.is_sweep_override()]
            problems += [Problem(name, "has several values; to sweep over them, add -m") for name in sweeping]
            parsed = [override for override in parsed if not override.is_sweep_override()]
        axes = [self._axis(override) for override in parsed]
        empty = [override.get_key_element() for override, axis in zip(parsed, axes, strict=True) if not axis]
        problems += [Problem(name, "sweeps over no value at all") for name in empty]
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
        """Plain data of one point, as far as its overrides can be used, and what is wrong with the others."""
        lines, problems, unsure = self._groups(overrides)
        config, broken = self._config(lines)
        problems += broken
        config = copy.deepcopy(config)
        for override in overrides:
            key = override.key_or_group
            package = override.package or key.replace("/", ".")
            if override.is_delete() and self.is_group(key) and not broken and _has(config, package):
                message = f"leaves the option out, but not what the experiment sets there; expected {key}=OPTION"
                none = f"{key}=none" if "none" in self._options(key) else None
                problems.append(Problem(override.get_key_element(), message, none))
            if self.is_group(key) or any(key == group or key.startswith(group + ".") for group in unsure):
                continue
            problem = self._unknown(override, config) or _apply(override, config)
            if problem is not None:
                problems.append(problem)
        problems += foreign_code(config["hydra"])
        self._refuse_of_hydra(config)
        with open_dict(config):
            del config["hydra"]
        _refuse(_interpolated(OmegaConf.to_container(config, resolve=False)))
        try:
            data: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)  # type: ignore[assignment]
            _refuse(secrets_in(data))
        except OmegaConfBaseException as error:
            return None, [*problems, Problem(str(getattr(error, "full_key", "") or "config"), _words(error))]
        if "experiment" in data:
            del data["experiment"]
            problems.append(Problem("+experiment", f"a file that it is based on {_GLOBAL}"))
        return data, problems

    def _refuse_of_hydra(self, config: DictConfig) -> None:
        """Refuses secrets in Hydra's own part, which it stores beside the output and passes to its plugins."""
        hydra: Any = OmegaConf.to_container(config.hydra, resolve=False)
        hydra = {name: part for name, part in hydra.items() if name not in ("overrides", "runtime", "help")}
        _refuse([*_interpolated(hydra, "hydra"), *secrets_in(hydra, "hydra")])

    def is_group(self, key: str) -> bool:
        """Return whether the key is a config group."""
        return bool(self.loader.repository.group_exists(key))

    def _options(self, group: str) -> list[str]:
        return sorted(self.loader.repository.get_group_options(group, ObjectType.CONFIG))

    def _groups(self, overrides: list[Override]) -> tuple[list[str], list[Problem], list[str]]:
        """Group overrides as lines to compose with, misspelt options replaced by the nearest; the problems; and the
        groups of which it is not known what was meant."""
        lines, problems, unsure = [], [], []
        for override in overrides:
            group = override.key_or_group
            if not self.is_group(group):
                continue
            name = override.get_key_element()
            value = override.value()
            wanted = value if isinstance(value, list) else [] if override.is_delete() and value is None else [value]
            options = self._options(group)
            wrong = [option for option in wanted if str(option) not in options]
            if not wrong and len(wanted) > 1 and not override.is_hydra_override():
                problems.append(_several(name, wanted))
                lines.append(f"{name}={wanted[0]}")
                continue
            if not wrong and group == EXPERIMENT and (lacking := self._without_package(str(wanted[0]))):
                problems.append(Problem(name, f"{lacking} {_GLOBAL}"))
                continue
            if not wrong:
                lines.append(override.input_line or name)
                continue
            meant = [near for option in wanted if (near := nearest(option, options))]
            for option in wrong:
                near = nearest(option, options)
                hint = f"{name}={near}" if near else None
                own = f". For one of your own, write DIR/{group}/NAME.yaml and add --config-dir DIR {name}=NAME"
                text = f"{option!r}: expected one of {', '.join(options)}{own if isinstance(option, dict) else ''}"
                problems.append(Problem(name, text, hint))
            if len(meant) == len(wanted):
                lines.append(f"{name}={'[' + ','.join(meant) + ']' if isinstance(value, list) else meant[0]}")
            else:
                unsure.append(override.package or group.replace("/", "."))
        return lines, problems, unsure

    def _without_package(self, option: str) -> str | None:
        """Return the file of an experiment that does not say that it is laid over the whole configuration."""
        try:
            found = self.loader.repository.load_config(f"{EXPERIMENT}/{option}")
        except COMPOSITION:
            return None  # composing says what is wrong with it
        if found is None or found.header.get("package") == "_global_":
            return None
        folder = str(found.path).removeprefix("file://")
        return f"{folder}/{EXPERIMENT}/{option}.yaml"

    def _own_groups(self) -> list[str]:
        return [group for group in self.loader.list_groups("") if group != "hydra"]

    def _plain(self, lines: list[str]) -> dict[str, Any]:
        """The composed config as plain data, without Hydra's part."""
        plain: Any = OmegaConf.to_container(self._load(lines), resolve=False)
        del plain["hydra"]
        return dict(plain)

    def _config(self, lines: list[str]) -> tuple[DictConfig, list[Problem]]:
        """Composes; where that fails, with as many of the lines as it works with."""
        try:
            return self._load(lines), []
        except COMPOSITION as error:
            broken: BaseException = error
        try:
            self._load([])
        except COMPOSITION:
            raise SpecError([Problem(PRIMARY, _words(broken))]) from broken
        used: list[str] = []
        problems = []
        for line in lines:
            try:
                self._load([*used, line])
                used.append(line)
            except COMPOSITION as error:
                key, plain = line.partition("=")[0], line.lstrip("+")
                known = key.lstrip("+~") in self._load(used).hydra.runtime.choices
                if line.startswith("~"):
                    option = self._load(used).hydra.runtime.choices.get(key.lstrip("~"))
                    what = f"{option!r} is chosen here" if option else "no option of this group is chosen"
                    problems.append(Problem(line, what, key if option else None))
                elif known and line.startswith("+"):
                    problems.append(Problem(key, "an option of this group is chosen already", plain))
                elif not known and not line.startswith(("+", "~")):
                    problems.append(
                        Problem(key, "no option of this group is chosen yet: it is added with +", f"+{plain}")
                    )
                else:
                    problems.append(Problem(key, _words(error)))
        return self._load(used), problems

    def _load(self, lines: list[str]) -> DictConfig:
        key = tuple(lines)
        if key not in self._composed:
            self._composed[key] = self.loader.load_configuration(PRIMARY, lines, RunMode.RUN)
        return self._composed[key]

    def _unknown(self, override: Override, config: DictConfig) -> Problem | None:
        """What is wrong with the key of an override of a single value."""
        key = override.key_or_group
        if override.package is not None:
            return Problem(override.get_key_element(), f"there is no group {key!r}; an @ follows the name of a group")
        if override.is_add() and _has(config, key) and not isinstance(override.value(), list | dict):
            return Problem(f"+{key}", "is set already, and + adds what is not", (override.input_line or "").lstrip("+"))
        if override.is_delete() and _has(config, key) and override.value() not in (None, OmegaConf.select(config, key)):
            return Problem(f"~{key}", f"has another value here: {OmegaConf.select(config, key)!r:.80}", f"~{key}")
        if override.is_hydra_override() or _has(config, key):
            return None
        plain = OmegaConf.to_container(config, resolve=False)
        assert isinstance(plain, dict)
        del plain["hydra"]
        *parents, last = key.split(".")
        inside: Any = plain
        for part in parents:
            inside = inside.get(part) if isinstance(inside, dict) else None
        if isinstance(inside, dict):
            valid = names_below(ExperimentSpec, plain, parents, _allowed(plain))
            if override.is_delete():
                return Problem(f"~{key}", "there is no such key to delete", _below(parents, nearest(last, inside)))
            if last in valid or not valid:  # where nothing is listed, validation knows what may stand there
                if override.is_add() or override.is_force_add():
                    return None
                return Problem(key, "is set by no config file: it is added with +", f"+{override.input_line}")
            if parents:
                message = f"no such key in {'.'.join(parents)}; there are {', '.join(valid)}"
                return Problem(key, message, _below(parents, nearest(last, valid)))
        if inside is None and (override.is_add() or override.is_force_add()) and _may_hold(plain, parents):
            return None
        if parents and inside is None and _has(config, ".".join(parents)):
            whole = ".".join(parents)
            value = override.get_value_element_as_str()
            return Problem(key, f"{whole} is null here, so all of it is given at once", f"{whole}={{{last}: {value}}}")
        groups = self._own_groups()
        near = nearest(key, [*_keys(plain), *groups])
        if near is not None and near in groups and not parents and isinstance(override.value(), str):
            option = nearest(override.value(), self._options(near))
            sign = "" if near in config.hydra.runtime.choices else "+"
            near = f"{sign}{near}={option}" if option else near
        return Problem(key, "there is no such key", near)


def _allowed(data: Mapping[Any, Any]) -> list[str]:
    """Packages that the configuration allows, as far as it names any."""
    allow = data.get("allow")
    return [package for package in allow if isinstance(package, str)] if isinstance(allow, list) else []


def _several(group: str, options: Sequence[Any]) -> Problem:
    """Several options for a group, of which Hydra would lay each over those before it."""
    names = ",".join(map(str, options))
    text = f"[{names}]: a group has one option; to try several, sweep over them: -m {group}={names}"
    return Problem(group, text, f"{group}={options[0]}")


def _may_hold(plain: Any, parents: list[str]) -> bool:
    """Whether the keys of `parents` that are not there yet can be added: the last one that is there may hold any."""
    there: Any = plain
    for count, part in enumerate(parents):
        if not isinstance(there.get(part), dict):
            return (
                there.get(part) is None
                and part not in there
                and not names_below(ExperimentSpec, plain, parents[:count])
            )
        there = there[part]
    return False


def _below(parents: list[str], name: str | None) -> str | None:
    return None if name is None else ".".join([*parents, name])


def _apply(override: Override, config: DictConfig) -> Problem | None:
    try:
        Loader._apply_overrides_to_config([override], config)
    except HydraException as error:
        cause = error.__cause__ or error
        key = override.get_key_element()
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
            *parents, last = str(cause.full_key).split(".")
            there = [str(name) for name in cause.parent_node]
            if not there:
                where = ".".join(parents)
                return Problem(key, f"{where} has no keys yet: they are added with +", f"+{where}.{last}=VALUE")
            message = f"no such key in {'.'.join(parents)}; there are {', '.join(there)}"
            return Problem(str(cause.full_key), message, _below(parents, nearest(last, there)))
        return Problem(key, _words(cause))
    return None


def _has(config: DictConfig, key: str) -> bool:
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


def _keys(data: Any, prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _refuse(found: Sequence[Secret]) -> None:
    if found:
        raise SpecError(secret_problems(found))


def _interpolated(value: Any, path: str = "") -> list[Secret]:
    """Secrets that an interpolation would copy from the environment into the configuration: `${oc.env:HF_TOKEN}`."""
    if isinstance(value, dict):
        items = ((f"{path}.{name}" if path else str(name), item) for name, item in value.items())
        return [secret for below, item in items for secret in _interpolated(item, below)]
    if isinstance(value, list):
        return [secret for item in value for secret in _interpolated(item, path)]
    names = _FROM_ENVIRONMENT.findall(value) if isinstance(value, str) else []
    if any(is_secret(name) for name in names) or (names and is_secret(path)):
        return [Secret(path, "an interpolation that copies a secret out of the environment")]
    return []


def _words(error: BaseException) -> str:
    return mask_text(" ".join(str(error).partition("full_key: ")[0].split())) or type(error).__name__
