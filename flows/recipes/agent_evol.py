"""AgentEvol: behavioural cloning, then rounds of exploration and training on all episodes selected so far
(arXiv:2406.04151, algorithm 1)."""

from __future__ import annotations

from typing import Literal

from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion

EvolveFrom = Literal["base", "start", "last"]


@recipe("rounds", "early_stopping", "warmup", "data")
def agent_evol(run: Run, spec: ExperimentSpec, *, evolve_from: EvolveFrom = "base") -> PolicyVersion:
    """Clone demonstrations; in each round explore with the current policy, select episodes, and train on the union of
    the demonstrations and of all selected episodes.

    evolve_from: policy that each training starts from: the base model, as in the paper, the cloned policy, or that of
    the round before."""
    start, data = run.warm_up(run.begin())
    for round in run.rounds(start):
        data += round.gather()
        policies = {"base": PolicyVersion(), "start": start, "last": round.policy}
        round.train(data, start=policies[evolve_from])
    return run.policy
