"""Online RL: supervised warmup, training on human feedback, then rounds of collect, judge, filter and train.

With `reward_model`, reward models are trained before the rounds and score them.
"""

from __future__ import annotations

from flows.experiment.flow import SHARED_KEYS, recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import Policy


@recipe(*SHARED_KEYS)
def online_rl(run: Run, spec: ExperimentSpec) -> Policy:
    """Run the stages of an experiment in order; of a fork, those after its starting step. Return the last policy."""
    warmup = spec.warmup if run.start.fork is None else None
    feedback = run.start.feedback is not None
    policy = run.begin(pretrains=warmup is not None or feedback)
    if warmup is not None:
        policy = run.train([run.demonstrations()], "sft", algorithm=warmup.algorithm, start=policy)
        run.evaluate(policy, "sft")
    if feedback:
        policy = run.train_on_feedback(policy)
    for round in run.rounds(policy):
        policy = round.train(round.gather())
    return policy
