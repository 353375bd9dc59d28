"""Multi-agent: the roles of an agent, such as planner and worker, are trained one after the other, then together."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.errors import Problem, SpecError
from components.trajectories.roles import PLANNER, WORKER
from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion

ALL = "all"
"""Phase in which all roles are trained."""


@recipe("rounds", "fork", "warmup")
def multi_agent(run: Run, spec: ExperimentSpec, *, order: Annotated[list[str], Field(min_length=1)]) -> PolicyVersion:
    """Train a role in each phase, for an equal share of the rounds: the tokens of the other roles are not trained.
    Evaluate after each phase, and report `success AFTER_PHASE`. Raises SpecError for a role that the agent does not
    have, and with fewer rounds than phases.

    order: role of each phase, or `all`, such as `[worker, planner, all]`: the low level first."""
    _check(spec, order)
    policy, _ = run.warm_up(run.begin())
    phases = [number * len(order) // spec.rounds for number in range(spec.rounds)]
    for round in run.rounds(policy):
        phase = phases[round.number - 1]
        role = order[phase]
        round.train(round.gather(), roles=None if role == ALL else [role])
        if round.number < spec.rounds and phases[round.number] != phase:
            name = f"{phase + 1}_{role}"
            run.report(f"success {name}", run.evaluate(run.policy, name).metrics.get("success"))
    return run.policy


def _check(spec: ExperimentSpec, order: list[str]) -> None:
    if spec.agent.roles is None and spec.agent.own is None:
        text = "null: one agent plays, and flow=multi_agent trains roles; expected agent=planner_worker"
        raise SpecError([Problem("agent.roles", text)])
    known = [PLANNER, WORKER, ALL]
    if spec.agent.roles is not None and (unknown := [role for role in order if role not in known]):
        text = f"{unknown[0]}: the agent has no such role; expected {', '.join(known)}"
        raise SpecError([Problem("flow.order", text)])
    if spec.rounds < len(order):
        text = f"{spec.rounds}: fewer than the {len(order)} phases of flow.order; expected a round for each"
        raise SpecError([Problem("rounds", text)])
