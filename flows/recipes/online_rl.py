"""Online RL: supervised warmup, training on human feedback, then rounds of collect, judge, filter and train.

With `reward_model`, reward models are trained before the rounds and score them.
"""

from __future__ import annotations

from flows.experiment.flow import SHARED_KEYS, recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion


@recipe(*SHARED_KEYS)
def online_rl(run: Run, spec: ExperimentSpec) -> PolicyVersion:
    """Run the stages of an experiment in order; of a fork, those after its starting step. Return the last policy."""
    policy, _ = run.warm_up(run.begin())
    policy = run.train_on_feedback(policy)
    for round in run.rounds(policy):
        round.train(round.gather())
    return run.policy
