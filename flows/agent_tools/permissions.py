"""Permissions of an agent: the experiments that the operator offers, and the overrides that it may give.

An agent's text is untrusted. The rules are those of served deployments (`flows.scheduling.parameters`): plain
`key=value` overrides of the keys that `serve.overrides` lists. In addition, no key chooses code, a program, a server, a
path or an environment variable (`components.specs.access`), in the configuration of the operator or of the run, which
may choose another option of a group. No value is a URL or a path outside of the root.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from components.errors import Problem, SpecError
from components.redaction import mask_text
from components.specs import nearest
from components.specs.access import access_at
from flows.experiment.spec import ExperimentSpec
from flows.scheduling import parameters
from flows.scheduling.parameters import ServedExperiment

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_STEP = re.compile(r"@[0-9]{1,6}")


class Permissions:
    """Offered experiments with their checked configurations."""

    def __init__(self, offered: Sequence[ServedExperiment]):
        """Compose each offered experiment. Raises SpecError with all problems of the operator's command line."""
        self._offered = {experiment.name: experiment for experiment in offered}
        self.specs: dict[str, ExperimentSpec] = {}
        problems: list[Problem] = []
        for name, experiment in self._offered.items():
            try:
                spec = self.specs[name] = parameters.resolve(experiment)
                new = list(_forbidden(spec, spec.serve.overrides))
            except SpecError as error:
                new = list(error.problems)
            problems += [problem for problem in new if problem not in problems]
        if problems:
            raise SpecError(problems)

    @property
    def root(self) -> Path:
        """Folder of the runs."""
        return self.root_of(next(iter(self.specs)))

    @property
    def roots(self) -> list[Path]:
        """Folders of the runs of all experiments."""
        return list(dict.fromkeys(map(self.root_of, self.specs)))

    @property
    def config_dir(self) -> Path | None:
        """Folder of the operator's own config groups."""
        folder = next(iter(self._offered.values())).config_dir
        return Path(folder) if folder else None

    def root_of(self, experiment: str) -> Path:
        """Return the folder of the runs of an experiment."""
        return Path(self.specs[experiment].root).absolute()

    def arguments(self, experiment: str, overrides: Sequence[str] = ()) -> list[str]:
        """Return the arguments of a command that composes the experiment. Raises SpecError for an experiment that is
        not offered, an override that is not allowed, and an invalid configuration."""
        served = self._offered.get(experiment)
        if served is None:
            problem = f"{experiment!r:.99}: is not offered; expected one of {', '.join(self._offered)}"
            raise SpecError([Problem("experiment", mask_text(problem), nearest(experiment[:99], self._offered))])
        allowed = self.specs[experiment].serve.overrides
        if problems := list(parameters.not_allowed(overrides, allowed)) or list(self._outside(overrides)):
            raise SpecError(problems)
        spec = parameters.resolve(served, overrides)
        if problems := list(_forbidden(spec, [line.partition("=")[0] for line in overrides])):
            raise SpecError(problems)
        return [*served.lines, *overrides, *(["--config-dir", served.config_dir] if served.config_dir else [])]

    def _outside(self, overrides: Sequence[str]) -> Iterator[Problem]:
        """Yield a problem for each allowed override whose value is a URL or a path outside of the root."""
        from flows.experiment.composer import Composer

        composer = Composer(self.config_dir)
        for override in composer.parse(overrides)[0]:
            key = override.get_key_element()
            if not composer.tree.is_group(key) and any(map(self._leaves_root, _texts(override.value()))):
                yield Problem(
                    key, f"an agent may give no URL and no path outside of {self.root}; expected a plain value"
                )

    def _leaves_root(self, value: str) -> bool:
        """Return True for a URL, and for a path outside of the root. A relative text is a path if its file exists."""
        if "://" in value or value.startswith("~"):
            return True
        try:
            path = Path(value)
            if not path.is_absolute() and ".." not in path.parts and not (value and path.exists()):
                return False
            return not path.resolve().is_relative_to(self.root.resolve())
        except (OSError, ValueError):
            return True


def run_name(text: str) -> str:
    """Return the reference to a run that the text is. Raises SpecError if it is none, such as an option."""
    if not _RUN.fullmatch(text):
        expected = "an id, the beginning of one, the name of an experiment, or latest"
        raise SpecError([Problem("run", mask_text(f"{text!r:.99} is no run; expected {expected}"))])
    return text


def policy_name(text: str) -> tuple[str, str]:
    """Return the run, or base, random or solver, and the step, such as `@3` or an empty text. Raises SpecError for
    other policies: prompted models of a provider cost money, and receive the scenarios."""
    name, at, step = text.partition("@")
    if not _RUN.fullmatch(name) or (at and not _STEP.fullmatch(at + step)):
        expected = "base, random, solver, RUN or RUN@STEP"
        raise SpecError([Problem("policies", mask_text(f"{text!r:.99} is no policy here; expected {expected}"))])
    return name, at + step


def _forbidden(spec: ExperimentSpec, keys: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each key whose value reaches out of the run."""
    for key in keys:
        if (access := access_at(spec, key)) is not None:
            message = f"{key!r} {access.text}, which an agent must not choose; remove this key"
            yield Problem("serve.overrides", message)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a scalar or a list of scalars."""
    yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str))
