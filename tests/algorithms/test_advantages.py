"""Advantages against the formula written out, and against TRL's own."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.algorithms.advantages import group_advantages

REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)
SIZES = [0.0, 5e-324, 1e-300, 1e-12, 1.0, 12345.678, 1e12, 1e300, 1.7e308]


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
    if deviation <= 1e-6 * size:  # next to nothing but rounding: told apart from equal rewards below
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [True, False])
def test_equal_up_to_rounding_is_equal_at_any_size(size, scale):
    rewards = [size, size * (1 + 1e-12), size]
    assert group_advantages(rewards, scale=scale) == [0.0] * 3


@pytest.mark.parametrize("size", [1e3, 1e12, 1e200, 1e300, 8e307])
def test_huge_rewards_that_differ(size):
    assert group_advantages([size, -size, 0.0], scale=True) == pytest.approx([1.5**0.5, -(1.5**0.5), 0.0], rel=1e-6)


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
    """TRL 1.16: (r - mean) / (nanstd + 1e-4), Bessel-corrected. Up to the two constants, ours is sqrt(G / (G - 1)) of
    it: the papers' population deviation."""
    import torch
    from trl.trainer.utils import nanstd

    if statistics.pstdev(rewards) < 1:
        return
    rewards_G = torch.tensor(rewards, dtype=torch.float64)
    trl_G = (rewards_G - rewards_G.mean()) / nanstd(rewards_G[None], dim=1)
    factor = (len(rewards) / (len(rewards) - 1)) ** 0.5
    assert group_advantages(rewards, scale=True) == pytest.approx((trl_G * factor).tolist(), rel=1e-5, abs=1e-9)
