"""Curriculum: online RL on growing difficulty. The next level is added when the policy masters the current ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from components.environments.mixture import Mixture
from components.errors import Problem, SpecError
from components.specs import Target, nearest
from components.specs.parameters import parameters_of
from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion


@recipe("rounds", "early_stopping", "warmup", "data")
def curriculum(
    run: Run,
    spec: ExperimentSpec,
    *,
    levels: Annotated[list[int | str], Field(min_length=1)],
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.8,
    unlocked: Annotated[int, Field(ge=1)] = 1,
    warmup_levels: Annotated[int, Field(ge=1)] | None = None,
) -> PolicyVersion:
    """Train on the first levels, and on one more after each round whose success rate reaches the threshold. Evaluations
    are on the whole of `environment`. Report `levels unlocked` at the end.

    levels: from easy to hard: difficulties, or names of the environments of a mixture. threshold: success rate of a
    round at which the next level is added. unlocked: number of levels of the first round. warmup_levels: number of
    levels that the warmup demonstrates; null: all. Raises SpecError for levels that the environment does not have."""
    _refuse(spec, levels, {"unlocked": unlocked, "warmup_levels": warmup_levels})
    run.refuse_overlap()
    policy, _ = run.warm_up(run.begin(), run.using(environment=_environment(spec, levels[:warmup_levels])))
    for round in run.rounds(policy):
        data = round.gather(run.using(environment=_environment(spec, levels[:unlocked])))
        round.train(data)
        if data[0].success >= threshold:
            unlocked = min(unlocked + 1, len(levels))
    run.report("levels unlocked", unlocked)
    return run.policy


def _environment(spec: ExperimentSpec, levels: Sequence[int | str]) -> Target:
    """Return the environment with these levels alone."""
    environment = spec.required_environment
    if environment.factory() is Mixture:
        environments = environment.arguments["environments"]
        return environment.with_arguments(environments={name: environments[name] for name in levels})
    return environment.with_arguments(difficulties=list(levels))


def _refuse(spec: ExperimentSpec, levels: Sequence[int | str], counts: Mapping[str, int | None]) -> None:
    """Raise SpecError for an environment without levels, a level that it does not have or that is repeated, a number of
    levels by key that is larger than there are, and one for a warmup that there is not."""
    environment = spec.required_environment
    if environment.factory() is Mixture:
        kind, known = "environments", list(environment.arguments["environments"])
    elif "difficulties" in environment.parameters():
        kind, default = "difficulties", parameters_of(environment.factory())["difficulties"].default
        known = list(environment.arguments.get("difficulties", default) or levels)
    else:
        raise SpecError([Problem("flow", f"curriculum: {environment.target} has no difficulties to choose from")])
    problems = []
    if repeated := [level for level, number in Counter(levels).items() if number > 1]:
        problems.append(Problem("flow.levels", f"{repeated[0]}: repeated; expected each level once"))
    if counts["warmup_levels"] is not None and spec.warmup is None:
        problems.append(Problem("flow.warmup_levels", "set, but there is no warmup; expected null, or warmup=sft"))
    for level in levels:
        if level not in known:
            hint = f". Did you mean {near}?" if (near := nearest(level, known)) else ""
            expected = f"expected some of the {kind} {', '.join(map(str, known))}"
            problems.append(Problem("flow.levels", f"{level}: not in environment.{kind}; {expected}{hint}"))
    for key, count in counts.items():
        if count is not None and count > len(levels):
            problems.append(Problem(f"flow.{key}", f"{count}: flow.levels has {len(levels)}; expected at most these"))
    if problems:
        raise SpecError(problems)
