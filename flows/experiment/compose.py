"""Composition of overrides into validated specs with Hydra, and a report of all mistakes before a run starts.

Hydra stops at the first invalid override and does not know the specs. `compose` and `check` check each override against
the config tree, compose and validate the valid ones, and report all problems as one `SpecError`. A sweep is validated
point by point, as far as its points are known in advance; a continuous range at both ends.

Secrets are detected first: in each override as written, and in each composed configuration. If there is one, nothing
else is reported, so that no other message repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from components.errors import SpecError
from components.specs import validate
from flows.experiment import sweep_settings
from flows.experiment.composer import UNNAMED, Composer, Sweep
from flows.experiment.config_loader import CONF
from flows.experiment.config_tree import EXPERIMENT
from flows.experiment.flow import unread_keys
from flows.experiment.override_problems import allowed_packages, has_key
from flows.experiment.spec import ExperimentSpec
from flows.terminal import overrides as override_lines


def compose(overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> ExperimentSpec:
    """Return the spec of one run. config_dir: folder of the user's own config groups. Raises SpecError."""
    return check(overrides, config_dir=config_dir)[0]


def check(
    overrides: Sequence[str], *, multirun: bool = False, config_dir: str | Path | None = None, named: bool = False
) -> list[ExperimentSpec]:
    """Return the specs of all points of the overrides; a single one if they do not sweep.

    named: also reject a configuration without an experiment and without a name. Raises SpecError with all problems of
    all points.
    """
    return compose_points(overrides, multirun=multirun, config_dir=config_dir, named=named)[0]


def compose_points(
    overrides: Sequence[str], *, multirun: bool = False, config_dir: str | Path | None = None, named: bool = False
) -> tuple[list[ExperimentSpec], Sweep | None]:
    """Return the specs as `check` does, and the sweep, or None if the overrides do not sweep."""
    composer = Composer(config_dir)
    override_lines.refuse_secrets(overrides)
    parsed, problems = composer.parse(overrides)
    parsed, experiment_problems = composer.several_experiments(parsed)
    problems += experiment_problems
    named = named and not any(f"+{EXPERIMENT}=" in str(problem) for problem in problems)
    sweep = composer.sweep(parsed, multirun, problems)
    points = composer.points(sweep.overrides if sweep else parsed, sweep is not None, problems)
    specs = []
    for point in points:
        data, point_problems = composer.point(point)
        if data is not None:
            if named and data.get("name") == UNNAMED and not composer.chooses_experiment(point):
                point_problems.append(composer.no_experiment())
            try:
                point_problems += unread_keys(data, allowed_packages(data))
                specs.append(validate(ExperimentSpec, data))
            except SpecError as error:
                paths = {problem.path for problem in point_problems}
                new = [
                    problem for problem in composer.without_copies(error.problems, point) if problem.path not in paths
                ]
                point_problems += [composer.traced(problem, point, data) for problem in new]
        problems += [problem for problem in point_problems if problem not in problems]
    if sweep is not None:
        problems += sweep_settings.problems(sweep.hydra, sweep.overrides, specs)
    if problems:
        raise SpecError(problems)
    return specs, sweep


def model_overrides(name: str) -> list[str]:
    """Return the overrides that select a model: an option of `model`, or a name on the hub."""
    return [f"model={name}"] if (CONF / "model" / f"{name}.yaml").is_file() else ["model=hf", f"model.name={name}"]


def check_secrets(overrides: Sequence[str], *, multirun: bool = False, config_dir: str | Path | None = None) -> None:
    """Raise SpecError if the configuration contains a secret, and for no other reason. Call it before Hydra prints."""
    override_lines.refuse_secrets(overrides)
    composer = Composer(config_dir)
    parsed, ignored = composer.parse(overrides)
    sweep = composer.sweep(parsed, multirun, ignored)
    for point in composer.points(sweep.overrides if sweep else parsed, sweep is not None, ignored):
        composer.point(point)


def missing_keys(keys: Sequence[str], overrides: Sequence[str], *, config_dir: str | Path | None = None) -> list[str]:
    """Return the keys that are neither a config group nor set in the composed config."""
    composer = Composer(config_dir)
    data, _ = composer.point(composer.parse(overrides)[0])
    config = OmegaConf.create(data or {})
    return [key for key in keys if not (composer.tree.is_group(key.partition("@")[0]) or has_key(config, key))]
