"""The experiment of a recorded run, admitted by `flows.history.trust`."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ValidationError

from components.errors import Problem, SpecError
from components.specs import validate
from components.specs.access import accesses
from components.specs.wording import first_problem
from flows.experiment.spec import ExperimentSpec
from flows.history.records import RunRecord
from flows.history.trust import admit, code_of

REPLACED = frozenset({"root", "deploy.target", "notify.url_variable"})
"""Settings that no command takes from a record."""


def reaches(run: RunRecord, trust: bool, replaced: Collection[str] = REPLACED) -> list[str]:
    """Return what the settings of a run reach out of it, but for those that the caller replaces. If the run allows
    packages and is not trusted, only these: reading the other settings would import them."""
    allow = run.spec.get("allow") or []
    code = code_of(allow)
    if code and not trust:
        return code
    try:  # without the cross-field checks, which build the environment
        spec = ExperimentSpec.model_validate(run.spec, context={"allow": allow})
    except ValidationError as error:
        raise SpecError([Problem(f"run {run.short}", first_problem(error))]) from None
    others = [reach for reach in accesses(spec) if not any(f"{reach.path}.".startswith(f"{key}.") for key in replaced)]
    return [*code, *map(str, others)]


def recorded_experiment(run: RunRecord, trust: bool, replaced: Collection[str] = REPLACED) -> ExperimentSpec:
    """Return the experiment of a run. Raises SpecError if it reaches out of the run and is not trusted."""
    admit(reaches(run, trust, replaced), f"run {run.short}", trust)
    return validate(ExperimentSpec, run.spec)
