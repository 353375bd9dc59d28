"""Guards of a run: what no single stage can see going wrong. Each warns, or ends the run with GuardStruck.

    no_signal               a filter left nothing to train on                                           rules
    reward_hacking          training reward rises while held-out success falls                          rules
    heldout_reward          training reward rises while another reward falls on held-out scenarios      rules
    length_drift            episodes are much longer, or shorter, than in the first rounds              drift
    repetition_drift        the policy repeats itself within a message                                  drift
    identical_answers       the policy says the same, whatever it is asked                              drift
    ensemble_disagreement   the judges of an ensemble disagree more and more                            drift

A guard decides from artifacts alone and is in no stage key. So the same command gives the same verdict, and with the
rule changed to `warn` it goes on from there.
"""

from flows.experiment.guards.drift import Look, drifted, first_and_last
from flows.experiment.guards.rules import MOST_NAMED, no_signal, reward_hacking, spans
from flows.experiment.guards.spec import ADVICE, DRIFTS, RULES, GuardsSpec
from flows.experiment.guards.watch import Guards

__all__ = [
    "ADVICE",
    "DRIFTS",
    "MOST_NAMED",
    "RULES",
    "Guards",
    "GuardsSpec",
    "Look",
    "drifted",
    "first_and_last",
    "no_signal",
    "reward_hacking",
    "spans",
]
