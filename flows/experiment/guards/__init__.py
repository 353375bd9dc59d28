"""Guards: checks across the stages of a run that warn or end the run with GuardTriggered.

    no_signal               a filter left nothing to train on                                           rules
    reward_hacking          training reward rises while held-out success falls                          rules
    heldout_reward          training reward rises while another reward falls on held-out scenarios      rules
    length_drift            episodes are much longer, or shorter, than in the first rounds              drift
    repetition_drift        the policy repeats itself within a message                                  drift
    identical_answers       the policy gives the same answer to different scenarios                     drift
    ensemble_disagreement   the disagreement between reward models of an ensemble rises                 drift
    amplified_rewards       advantages are divided by a tiny spread of rewards                          rules
    judge_drift             the judge scores the same episodes differently than at first                rules

A guard depends on artifacts only and is part of no stage key. So the same command triggers the same guards, and a run
that a guard ended resumes from the same round when its rule is changed to `warn`.
"""

from flows.experiment.guards.drift import RoundMetrics, drift_message, first_and_last
from flows.experiment.guards.rules import MOST_NAMED, no_signal, reward_hacking, spans
from flows.experiment.guards.spec import ADVICE, DRIFTS, RULES, GuardsSpec
from flows.experiment.guards.watch import RunGuards

__all__ = [
    "ADVICE",
    "DRIFTS",
    "MOST_NAMED",
    "RULES",
    "GuardsSpec",
    "RoundMetrics",
    "RunGuards",
    "drift_message",
    "first_and_last",
    "no_signal",
    "reward_hacking",
    "spans",
]
