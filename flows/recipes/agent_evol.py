"""AgentEvol: behavioural cloning, then rounds of exploration and training on all episodes selected so far
(arXiv:2406.04151, algorithm 1)."""

from __future__ import annotations

from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.generations import EvolveFrom, evolve
from flows.recipes.rounds import Round
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion


@recipe("rounds", "early_stopping", "warmup", "data", "reward_model")
def agent_evol(run: Run, spec: ExperimentSpec, *, evolve_from: EvolveFrom = "base") -> PolicyVersion:
    """Clone demonstrations; in each round explore with the current policy, select episodes, and train on the union of
    the demonstrations and of all selected episodes. Preference pairs leave out the demonstrations; a policy gradient
    trains on the episodes of the round only.

    evolve_from: policy that each training starts from: the base model, as in the paper, the cloned policy, or that of
    the round before."""
    keep = 1 if spec.algorithm.needs_sampled_tokens else None
    return evolve(run, Round.gather, evolve_from=evolve_from, keep=keep)
