"""Verdict on two settings: rates of wrong verdicts by simulation, and formulas against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from components.evaluation.verdict import (
    MOST_SEEDS,
    VarianceParts,
    more_seeds,
    outcome,
    paired_scenarios,
    power,
    scenarios_for,
    seeded_effect,
    seeded_verdict,
    smallest,
)


def side(generator, seeds: int, item_C, *, seed_sd: float, change_sd: float, gain: float = 0.0):
    """Return outcomes by seed and scenario, drawn from logits with effects of the setting on single scenarios, of the
    seed, and a gain that is common to all."""
    logit_SC = item_C + generator.normal(0, change_sd, item_C.size) + generator.normal(0, seed_sd, (seeds, 1)) + gain
    return (generator.random(logit_SC.shape) < 1 / (1 + np.exp(-logit_SC))).astype(float)


def share_decided(seeds, scenarios, *, seed_sd, change_sd, paired=True, gain=0.0, draws=1000) -> float:
    """Return the share of decided verdicts on simulated experiments."""
    generator = np.random.default_rng(0)
    decided = 0
    for _ in range(draws):
        item_C = generator.normal(0, 1, scenarios)
        before, after = (
            side(generator, number, item_C, seed_sd=seed_sd, change_sd=change_sd, gain=shift)
            for number, shift in ((seeds[0], 0.0), (seeds[1], gain))
        )
        decided += seeded_effect(before, after, paired=paired).outcome != "undecided"
    return decided / draws


NO_EFFECT = [
    ((3, 3), 64, 0.5, 0.0, True),
    ((3, 3), 64, 0.3, 0.5, True),
    ((5, 5), 256, 0.3, 0.5, True),
    ((2, 2), 64, 0.3, 0.5, True),
    ((3, 4), 64, 0.3, 0.5, False),
]


def test_without_an_effect_about_5_percent_of_the_verdicts_are_wrong():
    for seeds, scenarios, seed_sd, change_sd, paired in NO_EFFECT:
        share = share_decided(seeds, scenarios, seed_sd=seed_sd, change_sd=change_sd, paired=paired)
        assert 0.02 < share < 0.07, (seeds, scenarios)  # three standard errors of 1,000 draws: 0.021
    assert share_decided((3, 3), 64, seed_sd=0.0, change_sd=0.0) < 0.05  # cautious without variation over seeds


def test_a_bootstrap_over_seeds_would_be_wrong_far_more_often():
    """The reason for the t interval."""
    generator = np.random.default_rng(0)
    wrong = 0
    for _ in range(200):
        item_C = generator.normal(0, 1, 64)
        before, after = (side(generator, 3, item_C, seed_sd=0.5, change_sd=0.0) for _ in range(2))
        means = (after - before).mean(axis=1)
        low, high = np.quantile(means[generator.integers(3, size=(500, 3))].mean(axis=1), [0.025, 0.975])
        wrong += low > 0 or high < 0
    assert wrong / 200 > 0.15


def test_a_large_effect_is_decided():
    assert share_decided((3, 3), 64, seed_sd=0.2, change_sd=0.2, gain=2.5, draws=100) > 0.9


def test_the_variance_is_that_of_the_two_way_layout():
    """Against sums over all cells, written out."""
    generator = np.random.default_rng(1)
    n, m = 4, 30
    before, after = generator.random((n, m)), generator.random((n, m)) + generator.normal(0, 0.3, (n, 1)) + 0.2
    after += generator.normal(0, 0.5, m)  # effects on single scenarios
    d = after - before
    mean, rows, columns = d.mean(), [sum(d[i]) / m for i in range(n)], [sum(d[:, j]) / n for j in range(m)]
    seeds = m * sum((row - mean) ** 2 for row in rows) / (n - 1)
    scenarios = n * sum((column - mean) ** 2 for column in columns) / (m - 1)
    residual = sum((d[i, j] - rows[i] - columns[j] + mean) ** 2 for i in range(n) for j in range(m))
    residual /= (n - 1) * (m - 1)
    total = seeds + scenarios - residual
    assert total > max(seeds, scenarios)
    freedom = total**2 / (seeds**2 / (n - 1) + scenarios**2 / (m - 1) + residual**2 / ((n - 1) * (m - 1)))
    half = stats.t.ppf(0.975, freedom) * math.sqrt(total / (n * m))
    effect = seeded_effect(before, after, paired=True)
    assert (effect.difference, effect.low, effect.high) == pytest.approx((mean, mean - half, mean + half))


def test_seeds_that_are_not_paired_add_their_variances():
    before, after = np.zeros((3, 20)), np.zeros((2, 20))
    before[:, :10] = [[0.1] * 10, [0.2] * 10, [0.3] * 10]
    before[:, 10:] = before[:, :10]
    after[1] = 0.5
    effect = seeded_effect(before, after, paired=False)
    variance = 0.01 / 3 + 0.125 / 2
    assert effect.parts.variance() == pytest.approx(variance)
    freedom = variance**2 / ((0.01 / 3) ** 2 / 2 + (0.125 / 2) ** 2 / 1)
    assert effect.high == pytest.approx(0.05 + stats.t.ppf(0.975, freedom) * math.sqrt(variance)) or effect.high == 1.0


def test_equal_episodes_of_all_seeds_have_the_interval_of_one_seed():
    """All seeds agree on every scenario, so they are as one: Newcombe's interval of 8 pairs, as recomputed here."""
    z = stats.norm.ppf(0.975)
    limit = (z**2 / 8) / (1 + z**2 / 8)  # Wilson's upper limit of 0 of 8
    for success in (0.0, 1.0):
        table = np.full((2, 8), success)
        effect = seeded_effect(table, table, paired=True)
        assert (effect.difference, effect.outcome) == (0.0, "undecided")
        assert (effect.low, effect.high) == pytest.approx((-limit, limit))
        assert more_seeds(effect) is None
        assert scenarios_for(effect) is None


def test_the_interval_of_rare_successes_covers_the_gain():
    """Two seeds of 16 scenarios; a policy without success gains a rare one, on scenarios of which a share of the seeds
    agree. Simulated: the share of 2,000 intervals that cover the true gain."""
    for gain, shared, paired in itertools.product((0.02, 0.1), (0.0, 1.0), (True, False)):
        generator = np.random.default_rng(0)
        covered = 0
        for _ in range(2000):
            common_C = generator.random(16) < gain
            own_SC = generator.random((2, 16)) < gain
            after = np.where(generator.random(16) < shared, common_C, own_SC).astype(float)
            effect = seeded_effect(np.zeros((2, 16)), after, paired=paired)
            covered += effect.low <= gain <= effect.high
        assert covered / 2000 > 0.935, (gain, shared, paired)  # 95 % less three standard errors


def test_one_seed_and_one_scenario_are_refused():
    for shape in ((1, 10), (3, 1)):
        with pytest.raises(ValueError, match="at least 2 of each"):
            seeded_effect(np.zeros(shape), np.ones(shape), paired=True)


def test_power_is_the_share_of_significant_experiments():
    draws = 200_000
    for effect, error, freedom in ((0.1, 0.05, 2.0), (0.1, 0.03, 4.5), (0.02, 0.05, 30.0)):
        generator = np.random.default_rng(0)
        estimates = generator.normal(effect, error, draws)
        errors = error * np.sqrt(generator.chisquare(freedom, draws) / freedom)
        significant = np.abs(estimates) > stats.t.ppf(0.975, freedom) * errors
        assert power(effect, error, freedom) == pytest.approx(significant.mean(), abs=0.005)


def test_more_seeds_is_the_first_number_with_80_percent_power():
    parts = VarianceParts(((0.04**2, 3),), 0.01**2, 200)
    effect = seeded_effect(np.zeros((3, 200)), np.zeros((3, 200)), paired=True)
    effect = type(effect)(0.06, -0.1, 0.22, 200, parts)
    tried = [power(0.06, math.sqrt(0.04**2 * 3 / (3 + more) + 0.01**2), parts.freedom(more)) for more in range(1, 30)]
    expected = next(more for more, value in enumerate(tried, 1) if value >= 0.8)
    assert more_seeds(effect) == expected
    limited = type(effect)(0.02, -0.1, 0.14, 200, parts)  # the scenarios alone have a standard error of 0.01
    assert more_seeds(limited) is None
    assert scenarios_for(limited) == math.ceil(200 * 0.01**2 * (2.8015852 / 0.02) ** 2)


def test_the_smallest_number_is_found_by_bisection():
    assert [smallest(lambda n, least=least: n >= least, MOST_SEEDS, start=1) for least in (1, 2, 17, 1000, 1001)] == [
        1, 2, 17, 1000, None,
    ]  # fmt: skip


def test_the_verdict_names_the_seeds_that_would_decide_it():
    generator = np.random.default_rng(3)
    base_C = generator.random(60)
    before = {seed: (generator.random(60) < base_C).astype(float).tolist() for seed in (0, 1, 2)}
    after = {seed: (generator.random(60) < base_C + 0.08).astype(float).tolist() for seed in (0, 1, 2)}
    verdict = seeded_verdict(("A", "B"), before, after)
    assert verdict.verdict == "undecided"
    assert verdict.more_seeds
    assert f"{verdict.more_seeds} more seed" in verdict.text()
    assert verdict.to_json()["interval"] == [verdict.low, verdict.high]


def test_the_outcome_follows_from_the_interval():
    intervals = {(0.1, 0.2): "better", (-0.2, -0.1): "worse", (-0.1, 0.1): "undecided", (0.0, 0.1): "undecided"}
    assert {ends: outcome(*ends) for ends in intervals} == intervals
    assert outcome(None, None) == "undecided"


def test_the_number_of_scenarios_has_80_percent_power():
    """McNemar's test on simulated pairs."""
    for gain, discordance in ((0.1, 0.3), (0.2, 0.4), (0.05, 0.2)):
        n = paired_scenarios(gain, discordance)
        generator = np.random.default_rng(0)
        gained, lost = (discordance + gain) / 2, (discordance - gain) / 2
        counts = generator.multinomial(n, [gained, lost, 1 - discordance], size=20_000)
        difference, changed = counts[:, 0] - counts[:, 1], counts[:, 0] + counts[:, 1]
        significant = np.abs(difference) > 1.96 * np.sqrt(np.maximum(changed, 1))
        assert significant.mean() == pytest.approx(0.8, abs=0.025), (gain, discordance)
