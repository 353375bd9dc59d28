"""Curriculum: online RL on growing difficulty. The next level is added when the policy masters the current ones."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.errors import Problem, SpecError
from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion


@recipe("rounds", "early_stopping", "warmup", "data")
def curriculum(
    run: Run,
    spec: ExperimentSpec,
    *,
    levels: Annotated[list[int], Field(min_length=1)],
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.7,
) -> PolicyVersion:
    """Train on the first level, and on one more after each round whose success rate reaches the threshold. Evaluations
    are on all difficulties of `environment`.

    levels: difficulties, from easy to hard. threshold: success rate of a round at which the next level is added."""
    if "difficulties" not in spec.required_environment.parameters():
        raise SpecError(
            [Problem("flow", f"curriculum: {spec.required_environment.target} has no difficulties to choose from")]
        )
    run.refuse_overlap()
    policy, _ = run.warm_up(run.begin())
    reached = 1
    for round in run.rounds(policy):
        environment = spec.required_environment.with_arguments(difficulties=levels[:reached])
        data = round.gather(run.using(environment=environment))
        round.train(data)
        if data[0].success >= threshold:
            reached = min(reached + 1, len(levels))
    return run.policy
