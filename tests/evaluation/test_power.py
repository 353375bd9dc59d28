"""Power of a plan: formulas against brute force and simulation."""

from __future__ import annotations

import itertools
import math
from statistics import fmean

import numpy as np
import pytest

from components.evaluation.power import (
    Outcomes,
    detectable_gain,
    group_signal,
    group_size_for,
    intra_scenario_correlation,
    sampling_deviation,
    scenarios_for_gain,
    seeds_for_gain,
    signal_share,
    worst_discordance,
)


def test_signal_of_a_group_against_all_outcomes():
    for p, size in ((0.3, 4), (0.02, 8), (0.5, 2), (0.0, 8), (1.0, 3)):
        mixed = sum(
            math.prod(p if success else 1 - p for success in group)
            for group in itertools.product((0, 1), repeat=size)
            if len(set(group)) == 2
        )
        assert group_signal(p, size) == pytest.approx(mixed)


def test_the_share_from_samples_is_that_over_all_subsets():
    """Unbiased: the mean over all groups that the episodes contain."""
    for successes, episodes, size in ((2, 6, 3), (1, 5, 5), (3, 8, 2), (0, 6, 4)):
        outcomes = [1] * successes + [0] * (episodes - successes)
        expected = fmean(len(set(group)) == 2 for group in itertools.combinations(outcomes, size))
        assert signal_share([Outcomes(successes, episodes)], size) == pytest.approx(expected)


def test_the_share_of_larger_groups_follows_the_spread_of_the_scenarios():
    """From 4 episodes of each scenario to groups of 8; equal success of all scenarios would overestimate it."""
    generator = np.random.default_rng(0)
    p_S = generator.beta(0.5, 1.0, 4000)
    outcomes = [Outcomes(int(count), 4) for count in generator.binomial(4, p_S)]
    true = float(np.mean(1 - p_S**8 - (1 - p_S) ** 8))
    assert signal_share(outcomes, 8) == pytest.approx(true, abs=0.02)
    assert group_signal(float(p_S.mean()), 8) > true + 0.2
    assert intra_scenario_correlation(outcomes) == pytest.approx(1 / (0.5 + 1.0 + 1), abs=0.03)


def test_strata_are_averaged():
    easy, hard = [Outcomes(1, 1, "easy")] * 3, [Outcomes(n % 2, 1, "hard") for n in range(4)]
    assert signal_share([*easy, *hard], 4) == pytest.approx(4 / 7 * group_signal(0.5, 4))


def test_the_worst_discordance_is_the_largest_of_all_joint_distributions():
    """both + gained = after, both + lost = base: the discordance falls with the overlap."""
    for base, gain in ((0.3, 0.1), (0.7, 0.2), (0.05, 0.05), (0.5, 0.0)):
        after = base + gain
        overlaps = np.linspace(max(0.0, base + after - 1), min(base, after), 101)
        assert worst_discordance(base, gain) == pytest.approx(max(base + after - 2 * both for both in overlaps))


def test_the_detectable_gain_is_the_smallest_whose_scenarios_suffice():
    for scenarios, base, discordance in ((64, 0.3, 0.3), (512, 0.4, None), (96, None, None)):
        gain = detectable_gain(scenarios, base, discordance)
        assert gain
        assert scenarios_for_gain(gain, base, discordance) <= scenarios
        assert scenarios_for_gain(gain - 0.001, base, discordance) > scenarios
    assert detectable_gain(4, 0.9, None) is None


def test_the_number_of_seeds_has_80_percent_power():
    deviation, gain = 0.08, 0.1
    seeds = seeds_for_gain(gain, deviation)
    assert seeds
    generator = np.random.default_rng(0)
    gains = generator.normal(gain, deviation, (50_000, seeds))
    statistic = gains.mean(axis=1) / (gains.std(axis=1, ddof=1) / math.sqrt(seeds))
    from scipy.stats import t

    assert (np.abs(statistic) > t.ppf(0.975, seeds - 1)).mean() >= 0.795
    assert seeds_for_gain(0.001, 0.5) is None
    assert seeds_for_gain(0.1, 0.0) == 2


def test_the_deviation_by_sampling_is_that_of_simulated_pairs():
    generator = np.random.default_rng(0)
    counts = generator.multinomial(100, [0.25, 0.15, 0.6], size=50_000)
    assert sampling_deviation(0.1, 100, None, 0.4) == pytest.approx(
        ((counts[:, 0] - counts[:, 1]) / 100).std(), rel=0.02
    )


def test_the_group_size_is_the_smallest_that_reaches_the_share():
    outcomes = [Outcomes(round(1000 * p), 1000) for p in (0.1, 0.2)]
    sizes = (2, 4, 8, 16)
    size = group_size_for(outcomes, 0.5, sizes)
    assert [signal_share(outcomes, number) >= 0.5 for number in sizes] == [number >= size for number in sizes]
    assert group_size_for([Outcomes(0, 1000)], 0.5, sizes) is None
