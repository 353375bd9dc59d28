"""Advantages compared with the formula written out, and with TRL's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.algorithms.policy_gradient.advantages import advantages
from components.algorithms.policy_gradient.returns import discounted_sums, overlong, subtract_kl, turn_rewards
from components.algorithms.policy_gradient.trainer import scaling_metrics
from tests.algorithms.builders import make_history, make_trajectory

REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)
SIZES = [0.0, 5e-324, 1e-300, 1e-12, 1.0, 12345.678, 1e12, 1e300, 1.7e308]


def group_advantages(rewards_G: Sequence[float], *, scale: bool) -> list[float]:
    """Return the (G,) GRPO advantages of the (G,) rewards of one group, or those of Dr. GRPO if `scale` is False."""
    returns = [[reward] for reward in rewards_G]
    return list(chain(*advantages([returns], baseline="group", scale="group" if scale else "none")[0]))


def test_a_group_by_hand():
    rewards = [1.0, 0.0, 0.0, 1.0, 3.0]
    mean, deviation = 1.0, math.sqrt(6 / 5)
    assert group_advantages(rewards, scale=False) == [reward - mean for reward in rewards]
    expected = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
    assert group_advantages(rewards, scale=True) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None)
@given(REWARDS)
def test_the_formula(rewards):
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    size = max(map(abs, rewards))
    if deviation <= 1e-6 * size:  # differences near rounding; equal rewards are tested separately below
        return
    centred = [reward - mean for reward in rewards]
    assert group_advantages(rewards, scale=False) == pytest.approx(centred, abs=1e-9 * size)
    scaled = [value / (deviation + 1e-6) for value in centred]
    assert group_advantages(rewards, scale=True) == pytest.approx(scaled, rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(REWARDS, st.floats(-1e3, 1e3), st.booleans())
def test_a_shift_of_all_rewards_changes_nothing(rewards, shift, scale):
    if statistics.pstdev(rewards) < 1e-3:
        return
    shifted = group_advantages([reward + shift for reward in rewards], scale=scale)
    assert shifted == pytest.approx(group_advantages(rewards, scale=scale), rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 9), st.booleans())
def test_equal_rewards_carry_no_signal(reward, count, scale):
    assert group_advantages([reward] * count, scale=scale) == [0.0] * count


def test_equal_up_to_rounding_is_equal_at_any_size():
    for size in SIZES:
        for scale in (True, False):
            assert group_advantages([size, size * (1 + 1e-12), size], scale=scale) == [0.0] * 3, size


def test_huge_rewards_that_differ():
    expected = pytest.approx([1.5**0.5, -(1.5**0.5), 0.0], rel=1e-6)
    for size in (1e3, 1e12, 1e200, 1e300, 8e307):
        assert group_advantages([size, -size, 0.0], scale=True) == expected, size


@settings(deadline=None)
@given(st.lists(st.floats(-8e307, 8e307), min_size=1, max_size=8), st.booleans())
def test_advantages_are_finite_at_any_size(rewards, scale):
    assert all(math.isfinite(value) for value in group_advantages(rewards, scale=scale))


def test_tiny_rewards_carry_little_signal_because_of_the_constant_in_the_denominator():
    assert group_advantages([2e-6, 0.0], scale=True) == pytest.approx([0.5, -0.5])
    assert group_advantages([5e-324, 0.0], scale=True) == pytest.approx([0.0, 0.0], abs=1e-300)


@settings(deadline=None)
@given(REWARDS)
def test_trl_divides_by_the_sample_deviation_instead(rewards):
    """TRL 1.16: (r - mean) / (nanstd + 1e-4), Bessel-corrected. Apart from the two constants, ours is sqrt(G / (G - 1))
    times TRL's: the papers' population deviation."""
    import torch
    from trl.trainer.utils import nanstd

    if statistics.pstdev(rewards) < 1:
        return
    rewards_G = torch.tensor(rewards, dtype=torch.float64)
    trl_G = (rewards_G - rewards_G.mean()) / nanstd(rewards_G[None], dim=1)
    factor = (len(rewards) / (len(rewards) - 1)) ** 0.5
    assert group_advantages(rewards, scale=True) == pytest.approx((trl_G * factor).tolist(), rel=1e-5, abs=1e-9)


# --- baselines, scales and returns ------------------------------------------------------------------------------------


def test_what_is_known_to_give_nothing_and_what_not():
    """Cases from ART: rewards that are equal, huge or differ only by rounding; and one with a spread."""
    for rewards in ([0.1] * 3, [7e199] * 5, [5e-13 + 1.0, -5e-13 + 1.0]):
        for baseline in ("group", "leave_one_out"):
            for scale in ("group", "none"):
                [actual] = advantages([[[reward] for reward in rewards]], baseline=baseline, scale=scale)
                assert actual == [[0.0]] * len(rewards)
    mean, deviation = 1.25 / 3, statistics.pstdev([0, 0.25, 1])
    expected = [(reward - mean) / (deviation + 1e-6) for reward in (0, 0.25, 1)]
    assert group_advantages([0, 0.25, 1], scale=True) == pytest.approx(expected)


@settings(deadline=None)
@given(REWARDS)
def test_leave_one_out_is_g_over_g_minus_one_of_the_centred_reward(rewards):
    """TRL's RLOO computes the same: reward minus the mean of the siblings."""
    [actual] = advantages([[[reward] for reward in rewards]], baseline="leave_one_out", scale="none")
    count, total = len(rewards), sum(rewards)
    expected = [reward - (total - reward) / (count - 1) for reward in rewards]
    if not math.isclose(min(rewards), max(rewards), rel_tol=1e-9):
        assert [advantage for (advantage,) in actual] == pytest.approx(
            expected, abs=1e-9 * max(1.0, *map(abs, rewards))
        )


def test_the_whole_batch_as_baseline_and_scale():
    groups = [[[1.0], [1.0]], [[0.0], [4.0]]]
    mean, deviation = 1.5, statistics.pstdev([1, 1, 0, 4]) + 1e-6
    assert advantages(groups, baseline="batch", scale="batch") == [
        [[(value - mean) / deviation for value in episode] for episode in group] for group in groups
    ]
    assert advantages(groups, baseline="none", scale="none") == groups
    # A group without spread carries no signal where it is compared with itself, however the others scatter.
    flat, other = advantages(groups, baseline="group", scale="batch")
    assert flat == [[0.0], [0.0]]
    assert other == [[-2.0 / deviation], [2.0 / deviation]]


def test_returns_are_compared_within_their_cell():
    group, cells = [[3.0, 1.0], [2.0], [1.0, 5.0]], [["a", "b"], ["a"], ["a", "b"]]
    [actual] = advantages([group], baseline="group", scale="none", cells=[cells])
    assert actual == [[1.0, -2.0], [0.0], [-1.0, 2.0]]
    [actual] = advantages([group], baseline="leave_one_out", scale="none", cells=[cells])
    assert actual == [[1.5, -4.0], [0.0], [-1.5, 4.0]]
    [actual] = advantages([group], baseline="group", scale="group", cells=[cells])
    assert actual[0][1] == pytest.approx(-2.0 / (2.0 + 1e-6))
    # A return alone in its cell has no others to be compared with.
    for baseline in ("group", "leave_one_out", "batch"):
        [actual] = advantages([[[3.0, 9.0], [2.0]]], baseline=baseline, scale="none", cells=[[["a", "b"], ["a"]]])
        assert actual[0][1] == 0.0


def test_discounted_returns_of_turns():
    trajectory = make_trajectory(
        "a", 0, [make_history([(False, [5]), (True, [6, 7]), (False, [8]), (True, [9])], [-1, -1, -1])], 0.0
    )
    trajectory.step_rewards = [1.0, 4.0]
    assert discounted_sums(turn_rewards(trajectory), 0.5) == [3.0, 4.0]
    assert discounted_sums(turn_rewards(trajectory), 1.0) == [5.0, 4.0]
    assert discounted_sums(turn_rewards(trajectory), 0.0) == [1.0, 4.0]


def test_a_kl_by_token_is_that_which_is_still_to_come():
    assert subtract_kl([2.0], [3], [0.1, 0.2, 0.3], 10.0) == pytest.approx([-4.0, -3.0, -1.0])
    assert subtract_kl([2.0, 1.0], [1, 2], [0.1, 0.2, 0.3], 1.0) == pytest.approx([1.4, 0.5, 0.7])


def test_the_soft_punishment_of_length():
    assert [overlong(tokens, 100, 20) for tokens in (10, 80, 85, 90, 100, 500)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert [overlong(tokens, 100, 0) for tokens in (100, 101)] == [0.0, -1.0]


TINY = [0.0, -0.001]
"""Rewards of two failures, of which one is longer."""
CLEAR = [0.0, 1.0]


def test_the_divisor_of_a_tenth_of_the_groups_and_the_range_are_measured():
    tiny, clear = math.sqrt(0.001**2 / 4), 0.5  # population standard deviations of two values: half their difference
    assert scaling_metrics([TINY, CLEAR, [1.0, 1.0]], "group") == pytest.approx(
        {"advantage_divisor": tiny, "reward_range": 1.001}
    )
    one_of_twelve, two_of_twelve = [TINY, *[CLEAR] * 11], [TINY, TINY, *[CLEAR] * 10]
    assert scaling_metrics(one_of_twelve, "group")["advantage_divisor"] == clear
    assert scaling_metrics(two_of_twelve, "group")["advantage_divisor"] == pytest.approx(tiny)
    returns = [value for group in two_of_twelve for value in group]
    mean = sum(returns) / len(returns)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in returns) / len(returns))
    assert scaling_metrics(two_of_twelve, "batch")["advantage_divisor"] == pytest.approx(deviation)
    assert scaling_metrics([TINY, CLEAR], "none") == scaling_metrics([[1.0, 1.0]], "group") == {}


def test_the_measured_divisor_is_what_tiny_differences_are_divided_by():
    (tiny, _) = advantages([[[value] for value in group] for group in (TINY, CLEAR)], baseline="group", scale="group")
    divisor = scaling_metrics([TINY, CLEAR], "group")["advantage_divisor"]
    assert tiny[0][0] == pytest.approx(0.0005 / divisor, rel=0.01)
    assert tiny[0][0] > 0.99  # as large as the advantage of a success among failures
