"""Parameters of a deployment's run: the operator's configuration, and the overrides of the user who starts the run.

The operator's configuration (experiment, overrides, config folder) reaches the executing process in its environment
(`ESPALIER_DEPLOYMENTS`), not through Prefect: every user who can start a run can also change what Prefect stores. The
key `serve.overrides` of the experiment lists the keys that a run may set. This module does not import Prefect.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.errors import Problem, ResourceError, SpecError
from components.redaction import reference
from flows.experiment.spec import ExperimentSpec

VARIABLE = "ESPALIER_DEPLOYMENTS"
"""Environment variable with the deployments that a process may run, as a JSON object by name."""
MOST_OVERRIDES = 64
LONGEST_OVERRIDE = 1000
"""Limits on the number of a run's overrides and on the characters of each, since all are parsed and composed."""
_EXPERIMENT = re.compile(r"\+?experiment=")


@dataclass(frozen=True)
class ServedExperiment:
    """Experiment that an operator serves."""

    name: str
    experiment: str
    overrides: tuple[str, ...] = ()
    config_dir: str | None = None

    @property
    def lines(self) -> list[str]:
        """Overrides of the deployment's command line."""
        return [f"+experiment={self.experiment}", *self.overrides]


def experiment_names(overrides: Sequence[str]) -> list[str]:
    """Return the names of the experiments in the overrides of a command line: `+experiment=A,B`."""
    lines = [line for line in overrides if _EXPERIMENT.match(line)]
    return [name for line in lines for name in line.partition("=")[2].split(",") if name]


def experiment_problems(names: Sequence[str]) -> list[Problem]:
    """Return the problems of the experiments on a command line: none is given, or one twice."""
    problems = []
    if not names:
        problems.append(Problem("+experiment", "no experiment is given; expected +experiment=NAME"))
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        problems.append(Problem("+experiment", f"{', '.join(duplicates)}: given twice; expected each experiment once"))
    return problems


def requested_experiments(
    overrides: Sequence[str], config_dir: str | Path | None = None, name: str | None = None
) -> list[ServedExperiment]:
    """Return one entry per experiment on a command line. name: name in place of the experiment's."""
    others = tuple(line for line in overrides if not _EXPERIMENT.match(line))
    folder = str(Path(config_dir).absolute()) if config_dir else None
    return [
        ServedExperiment(name or experiment, experiment, others, folder) for experiment in experiment_names(overrides)
    ]


def to_json(deployments: Iterable[ServedExperiment]) -> str:
    """Return the value of `VARIABLE` for processes that may run these deployments."""
    return json.dumps(
        {
            deployment.name: {key: value for key, value in asdict(deployment).items() if key != "name"}
            for deployment in deployments
        }
    )


def from_environment(name: str) -> ServedExperiment:
    """Return the operator's configuration of a deployment. Raises ResourceError if `VARIABLE` does not contain it."""
    text = os.environ.get(VARIABLE)
    if not text:
        raise ResourceError(
            f"{VARIABLE} is not set, so this process may run no deployment. Start runs with python -m flows.serve, or "
            "start workers with the command that flows.serve --pool prints"
        )
    try:
        data: dict[str, dict[str, Any]] = json.loads(text)
        deployments = {
            key: ServedExperiment(
                key, str(entry["experiment"]), tuple(map(str, entry["overrides"])), entry["config_dir"]
            )
            for key, entry in data.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ResourceError(
            f"{VARIABLE} is not valid; expected the complete value that flows.serve --pool prints"
        ) from None
    if name not in deployments:
        raise ResourceError(
            f"this process may not run deployment {name!r}; {VARIABLE} contains {', '.join(deployments)}"
        )
    return deployments[name]


def resolve(deployment: ServedExperiment, requested: Sequence[str] = ()) -> ExperimentSpec:
    """Return the spec of one run: the operator's configuration with the run's overrides.

    Raises SpecError with all problems of both, including overrides that hold a secret, configure Hydra itself, or set a
    key that `serve.overrides` does not list.
    """
    from flows.experiment.compose import compose, missing_keys
    from flows.terminal.overrides import refuse_secrets

    refuse_secrets(deployment.overrides)
    if refused := list(_refused(deployment.overrides)):
        raise SpecError(refused)
    spec = compose(deployment.lines, config_dir=deployment.config_dir)
    if missing := missing_keys(spec.serve.overrides, deployment.lines, config_dir=deployment.config_dir):
        raise SpecError([Problem("serve.overrides", f"{key!r}: no such key in this experiment") for key in missing])
    if not requested:
        return spec
    if refused := list(not_allowed(requested, spec.serve.overrides)) or list(_refused(requested)):
        raise SpecError(refused)
    refuse_secrets(requested)
    return compose([*deployment.lines, *requested], config_dir=deployment.config_dir)


def schema(allowed: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schema of the overrides that a run may set. Prefect's form uses it for early feedback; `resolve`
    enforces the rules in the executing process."""
    keys = "|".join(re.escape(key) for key in allowed)
    item = {"type": "string", "maxLength": LONGEST_OVERRIDE, "pattern": f"^({keys})=" if allowed else "^$"}
    return {"type": "array", "items": item, "maxItems": MOST_OVERRIDES if allowed else 0}


def not_allowed(lines: Sequence[str], allowed: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each override that is not a plain `key=value` with an allowed key."""
    from hydra.core.override_parser.types import OverrideType

    from flows.experiment.composer import Composer
    from flows.terminal.overrides import mask_overrides

    if len(lines) > MOST_OVERRIDES:
        yield Problem("overrides", f"{len(lines)} overrides; expected at most {MOST_OVERRIDES}")
        return
    composer = Composer()
    keys = f"serve.overrides lists {', '.join(allowed)}" if allowed else "serve.overrides lists no key"
    for line in lines:
        shown = repr(mask_overrides([line[:80]])[0])
        if len(line) > LONGEST_OVERRIDE:
            yield Problem("overrides", f"{shown}…: {len(line)} characters; expected at most {LONGEST_OVERRIDE}")
            continue
        try:
            parsed, problems = composer.parse([line])
        except RecursionError:
            parsed, problems = [], [Problem("overrides", f"{shown}: is nested too deeply; expected key=value")]
        if problems:
            yield from problems
            continue
        (override,) = parsed
        key = override.get_key_element()
        if override.type is not OverrideType.CHANGE or key not in allowed:
            yield Problem("overrides", f"{shown}: a run may not set this; {keys} (expected key=value)")
        elif any(map(reference, _items(override.value()))):
            yield Problem("overrides", f"{shown}: a run may not read environment variables; expected a plain value")
        elif override.is_sweep_override() or not _plain(override.value()) or _calls(line):
            yield Problem(
                "overrides",
                f"{shown}: expected a scalar or a list of scalars; no mapping, interpolation, function or sweep",
            )


def _plain(value: Any) -> bool:
    """Return True if a value is a scalar or a list of scalars.

    A mapping could set keys that are not allowed, and an interpolation (`${oc.env:NAME}`) could reveal data of the
    operator. The check uses the parsed text, because `$\\{` parses to an interpolation, too.
    """
    scalars = all(isinstance(item, str | int | float | bool | None) for item in _items(value))
    return scalars and not any(isinstance(item, str) and "$" in item and "{" in item for item in _items(value))


def _items(value: Any) -> list[Any]:
    """Return the items of a list; a list of the value if it is none."""
    return value if isinstance(value, list) else [value]


def _calls(line: str) -> bool:
    """Return True if a valid override calls a function of Hydra's grammar, such as `int(1)`.

    It is parsed again without functions. Calls are rejected because Prefect stores and shows the override's text, which
    has to be the value that the run uses.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from flows.experiment.hydra_internals import Functions

    try:
        OverridesParser(Functions()).parse_override(line)
    except HydraException:
        return True
    return False


def _refused(overrides: Sequence[str]) -> Iterator[Problem]:
    for line in overrides:
        key = line.partition("=")[0].lstrip("+~")
        if key == "experiment":
            yield Problem(key, "is fixed by the deployment; remove this override")
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            yield Problem(key, "is for the command line only; remove this override")
