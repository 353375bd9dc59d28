"""When the rounds end, and which policy is the best: of numbers alone."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from components.artifacts import Artifact
from flows.experiment.early_stopping import EarlyStoppingSpec, EvaluatedPolicy, best_of, choose, should_stop, why_stop

VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def measured(*values, trained=True, digest="digest"):
    """Policies evaluated after rounds 0, 2, 4 and so on."""
    found = []
    for place, value in enumerate(values):
        metrics = {} if value is None else {"success": value, "reward": -value}
        evaluation = Artifact(f"e{place}", "evaluation", "evaluate", 1, digest, Path(), metrics, {}, (), 0.0)
        checkpoint = Artifact(f"c{place}", "checkpoint", "train", 1, "x", Path(), {}, {}, (), 0.0)
        found.append(EvaluatedPolicy(2 * place, checkpoint if place or trained else None, evaluation))
    return found


PATIENCE = [
    ([0.5], 1, 0.0, False),  # nothing to compare with
    ([0.5, 0.5], 1, 0.0, True),  # as good is no gain
    ([0.5, 0.51], 1, 0.0, False),
    ([0.5, 0.51], 1, 0.01, True),  # not above the least gain
    ([0.5, 0.4], 2, 0.0, False),  # patience
    ([0.5, 0.4, 0.5], 2, 0.0, True),
    ([0.5, 0.4, 0.6], 2, 0.0, False),
    ([0.5, 0.6, 0.4, 0.3], 2, 0.0, True),  # the best before is not the first
    ([0.5, 0.51, 0.53], 2, 0.02, False),  # a slow rise counts as a whole
    ([0.5, 0.4, None], 2, 0.0, False),  # not known: go on
    ([None, 0.4], 1, 0.0, False),
]


def test_the_rounds_end_when_patience_is_used_up():
    for values, patience, min_gain, stops in PATIENCE:
        assert should_stop(values, patience, min_gain) == stops, (values, patience, min_gain)


@given(VALUES, st.integers(1, 5))
def test_a_run_that_rises_never_ends_early_and_one_that_stands_still_does(values, patience):
    assert not should_stop(sorted(set(values)), patience, 0.0)
    assert should_stop([0.5] * (patience + 1), patience, 0.0)


@given(VALUES)
def test_the_best_is_the_earliest_of_the_highest(values):
    assert best_of(values) == values.index(max(values))


def test_what_is_not_known_is_not_the_best():
    assert best_of([None, 0.2, 0.3, None]) == 2
    assert best_of([None]) is None
    assert best_of([]) is None


def test_why_says_round_and_numbers():
    rule = EarlyStoppingSpec(patience=2, min_gain=0.05)
    assert why_stop(measured(0.5, 0.6, 0.62, 0.64), rule) == (
        "the rounds end after round 6: held-out success has not risen by more than 0.05 above 0.600 (step 2) in the "
        "last 2 evaluations (0.620, 0.640)"
    )
    assert why_stop(measured(0.5, 0.6), rule) is None
    by_reward = EarlyStoppingSpec(patience=1, metric="reward")
    assert "held-out reward has not risen above -0.500 (step 0) in the last evaluation (-0.600)" in str(
        why_stop(measured(0.5, 0.6), by_reward)
    )


def test_the_reward_decides_where_no_episode_states_its_success():
    silent = measured(0.2, 0.1, 0.3)
    for policy in silent:
        del policy.evaluation.metrics["success"]
    rule = EarlyStoppingSpec(patience=1)
    assert "held-out reward has not risen above -0.100 (step 2) in the last evaluation (-0.300)" in str(
        why_stop(silent, rule)
    )
    assert choose(silent, "success").step == 2
    assert why_stop([*measured(0.5), *measured(0.6, None, None, digest="")[1:]], rule) is None  # pending, in a plan


def test_the_best_policy_has_a_checkpoint():
    assert choose(measured(0.5, 0.7, 0.7, 0.1), "success").step == 2
    assert choose(measured(0.5, 0.7, 0.7, 0.1), "reward").step == 6
    assert choose(measured(0.9, 0.3, 0.4, trained=False), "success").step == 4


def test_the_last_one_is_taken_where_the_best_is_not_known():
    assert choose(measured(None, None), "success").step == 2
    assert choose([*measured(0.9, 0.3), *measured(None, None, None, digest="")[2:]], "success").step == 4
