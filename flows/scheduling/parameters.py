"""What a run of a deployment is made of: the operator's part, and the overrides of whoever starts the run.

The operator's part (experiment, overrides, config folder) reaches the process that runs in its environment
(`ESPALIER_DEPLOYMENTS`), not through Prefect, where everybody who can start a run can also change what is stored. The
key `serve.overrides` of that experiment lists the keys that a run may set. No Prefect here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from components.errors import Problem, ResourceError, SpecError
from flows.experiment.spec import ExperimentSpec

VARIABLE = "ESPALIER_DEPLOYMENTS"
"""Environment variable of a process that runs deployments: JSON of those that it may run, by name."""
MOST_OVERRIDES = 64
LONGEST_OVERRIDE = 1000
"""Bounds of what a run may ask for; each override is parsed and composed."""


@dataclass(frozen=True)
class Deployment:
    """One experiment, as the operator serves it."""

    name: str
    experiment: str
    overrides: tuple[str, ...] = ()
    config_dir: str | None = None

    @property
    def lines(self) -> list[str]:
        """The overrides of its command line."""
        return [f"+experiment={self.experiment}", *self.overrides]


def to_json(deployments: Iterable[Deployment]) -> str:
    """Return the value of `VARIABLE` for processes that may run these deployments."""
    return json.dumps({one.name: {k: v for k, v in asdict(one).items() if k != "name"} for one in deployments})


def from_environment(name: str) -> Deployment:
    """Return the operator's part of a deployment. Raises ResourceError where this process was not told of it."""
    text = os.environ.get(VARIABLE)
    if not text:
        raise ResourceError(
            f"{VARIABLE} is not set: this process was told of no deployment that it may run. Start runs by "
            "python -m flows.serve, or its workers by the command that flows.serve --pool prints"
        )
    try:
        data: dict[str, dict[str, Any]] = json.loads(text)
        deployments = {
            key: Deployment(key, str(one["experiment"]), tuple(map(str, one["overrides"])), one["config_dir"])
            for key, one in data.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ResourceError(f"{VARIABLE} is not what flows.serve --pool prints; copy the whole of it") from None
    if name not in deployments:
        raise ResourceError(
            f"{name!r} is no deployment that this process may run; {VARIABLE} names {', '.join(deployments)}"
        )
    return deployments[name]


def resolve(deployment: Deployment, requested: Sequence[str] = ()) -> ExperimentSpec:
    """Return the spec of one run: what the operator serves, with the overrides that the run asks for. Raises SpecError
    with every mistake of either; also for an override that holds a secret, is for Hydra's own launcher, or sets a key
    that `serve.overrides` does not list."""
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
    """Return the JSON schema of the overrides that a run may ask for. It makes Prefect's form say so early; what
    counts is `resolve`, in the process that runs."""
    import re

    keys = "|".join(re.escape(key) for key in allowed)
    item = {"type": "string", "maxLength": LONGEST_OVERRIDE, "pattern": f"^({keys})=" if allowed else "^$"}
    return {"type": "array", "items": item, "maxItems": MOST_OVERRIDES if allowed else 0}


def not_allowed(lines: Sequence[str], allowed: Sequence[str]) -> Iterator[Problem]:
    """Problems of overrides that are not plain `key=value` with a key of the list."""
    from hydra.core.override_parser.types import OverrideType

    from flows.experiment.compose import Composer
    from flows.terminal.overrides import mask_overrides

    if len(lines) > MOST_OVERRIDES:
        yield Problem("overrides", f"{len(lines)} of them; expected {MOST_OVERRIDES} at most")
        return
    composer = Composer()
    keys = f"serve.overrides lists {', '.join(allowed)}" if allowed else "serve.overrides lists no key"
    for line in lines:
        shown = repr(mask_overrides([line[:80]])[0])
        if len(line) > LONGEST_OVERRIDE:
            yield Problem("overrides", f"{shown}…: {len(line)} characters; expected {LONGEST_OVERRIDE} at most")
            continue
        try:
            parsed, problems = composer.parse([line])
        except RecursionError:
            parsed, problems = [], [Problem("overrides", f"{shown}: is nested too deep; expected key=value")]
        if problems:
            yield from problems
            continue
        (override,) = parsed
        key = override.get_key_element()
        if override.type is not OverrideType.CHANGE or key not in allowed:
            yield Problem("overrides", f"{shown}: a run may not set this; {keys} (expected key=value)")
        elif override.is_sweep_override() or not _plain(override.value()) or _calls(line):
            yield Problem(
                "overrides",
                f"{shown}: expected one plain value, or a list of such; no mapping, reference, function or sweep",
            )


def _plain(value: Any) -> bool:
    """Return whether a value is a scalar or a list of scalars. A mapping could hold keys that are not listed, and a
    reference (`${oc.env:NAME}`) shows what is not the caller's; the parsed text is looked at, for `$\\{` is one too."""
    items = value if isinstance(value, list) else [value]
    scalars = all(isinstance(item, str | int | float | bool | None) for item in items)
    return scalars and not any(isinstance(item, str) and "$" in item and "{" in item for item in items)


def _calls(line: str) -> bool:
    """Return whether an override that can be read calls a function of Hydra's grammar, as `int(1)`, by reading it
    where there are none. Prefect stores and shows what was given, and it is to be what runs."""
    from hydra._internal.grammar.functions import Functions
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser(Functions()).parse_override(line)
    except HydraException:
        return True
    return False


def _refused(overrides: Sequence[str]) -> Iterator[Problem]:
    for line in overrides:
        key = line.partition("=")[0].lstrip("+~")
        if key == "experiment":
            yield Problem(key, "is chosen by the deployment; expected no such override")
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            yield Problem(key, "is for the command line only; expected no such override")
