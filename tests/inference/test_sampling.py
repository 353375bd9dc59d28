"""Tests of sampling: distribution, log-probability, and independence of rows."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.inference.protocol import Sampling
from components.inference.transformers.sampling import draw, truncate
from components.models.distribution import Cut

logits = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=12)


def nucleus(values: list[float], top_p: float, top_k: int) -> dict[int, float]:
    """Token to probability, written out."""
    weights = [math.exp(value) for value in values]
    order = torch.tensor(values, dtype=torch.float64).sort(descending=True).indices.tolist()
    support = order[: top_k or None]
    total = math.fsum(weights[index] for index in support)
    chosen: list[int] = []
    for index in support:
        if chosen and math.fsum(weights[scenario] for scenario in chosen) / total >= top_p:
            break
        chosen.append(index)
    mass = math.fsum(weights[index] for index in chosen)
    return {index: weights[index] / mass for index in chosen}


@given(logits, st.floats(0.05, 0.95), st.integers(0, 14))
def test_truncation_is_the_formula(values, top_p, top_k):
    logps = torch.log_softmax(torch.tensor(values, dtype=torch.float64), -1)
    expected = nucleus(logps.tolist(), top_p, top_k)
    truncated = truncate(logps, Cut(top_p=top_p, top_k=top_k))
    masses = sorted(nucleus(logps.tolist(), 1.0, top_k).values(), reverse=True)
    if any(abs(math.fsum(masses[:n]) - top_p) < 1e-9 for n in range(1, len(masses))):
        return  # a sum that rounds to either side of top_p
    support = [index for index, logp in enumerate(truncated.tolist()) if logp > -math.inf]
    left_out = [index for index in range(len(values)) if index not in support]
    assert not left_out or min(logps[support]) >= max(logps[left_out])  # of equals, either may be kept
    assert sorted(truncated[support].exp().tolist()) == pytest.approx(sorted(expected.values()), abs=1e-9)


def test_top_k_alone_keeps_k():
    """Also where the sum of the first few rounds to one."""
    logps = torch.log_softmax(torch.tensor([30.0, 0.0, -1.0, -2.0, -3.0]), -1)
    assert int((truncate(logps, Cut(top_k=4)) > -math.inf).sum()) == 4
    assert int((truncate(logps, Cut(top_k=99)) > -math.inf).sum()) == 5


@given(logits, st.floats(0.01, 1.0))
def test_min_p_keeps_what_has_that_share_of_the_likeliest(values, min_p):
    logps = torch.log_softmax(torch.tensor(values, dtype=torch.float64), -1)
    probabilities = logps.exp()
    share = probabilities / probabilities.max()
    if (share - min_p).abs().min() < 1e-9:
        return
    expected = torch.where(share >= min_p, probabilities, 0.0)
    assert torch.allclose(truncate(logps, Cut(min_p=min_p)).exp(), expected / expected.sum())


def test_min_p_comes_after_the_others():
    logps = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert int((truncate(logps, Cut(top_k=2, min_p=0.2)) > -math.inf).sum()) == 2
    assert int((truncate(logps, Cut(top_k=3, min_p=0.5)) > -math.inf).sum()) == 2
    tokens, logprobs = draw(logps[None], [Sampling(min_p=0.5)], [0.9])
    assert tokens == [1]
    assert logprobs == pytest.approx([math.log(0.3 / 0.8)])


@given(logits, st.floats(0.2, 3.0), st.floats(0, 1, exclude_max=True))
def test_a_token_is_the_inverse_of_the_cumulative_distribution(values, temperature, uniform):
    tokens, logprobs = draw(torch.tensor([values]), [Sampling(temperature=temperature)], [uniform])
    probabilities = torch.softmax(torch.tensor(values, dtype=torch.float64) / temperature, -1)
    cumulative = probabilities.cumsum(-1)
    below = float(cumulative[tokens[0] - 1]) if tokens[0] else 0.0
    assert below - 1e-5 <= uniform <= float(cumulative[tokens[0]]) + 1e-5
    assert logprobs[0] == pytest.approx(float(probabilities[tokens[0]].log()), abs=1e-4)


def test_frequencies_are_the_distribution():
    """Chi-squared over 20,000 draws of 6 tokens, at each setting."""
    from scipy.stats import chisquare

    rng = random.Random(0)
    values = [1.0, 0.0, -1.0, 2.0, 0.5, -3.0]
    rows = torch.tensor([values]).expand(20_000, -1)
    for sampling in (Sampling(), Sampling(temperature=0.7, top_p=0.9), Sampling(top_k=3)):
        scaled = [value / sampling.temperature for value in values]
        expected = nucleus(scaled, sampling.top_p, sampling.top_k)
        tokens, logprobs = draw(rows.clone(), [sampling] * 20_000, [rng.random() for _ in range(20_000)])
        assert set(tokens) == set(expected)
        counts = [tokens.count(token) for token in expected]
        assert chisquare(counts, [20_000 * p for p in expected.values()]).pvalue > 1e-3
        for token, logprob in set(zip(tokens, logprobs, strict=True)):
            assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)


def test_greedy_carries_the_logprob_at_temperature_one():
    rows = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]])
    tokens, logprobs = draw(rows, [Sampling(temperature=0, top_k=1, top_p=0.5)] * 2, [0.99, 0.99])
    assert tokens == [1, 0]
    assert logprobs == pytest.approx([row.log_softmax(-1).max().item() for row in rows])


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 50, generator=generator)
    ways = [Sampling(), Sampling(temperature=0), Sampling(top_p=0.3), Sampling(top_k=2), Sampling(temperature=2.0)]
    samplings = [ways[index % len(ways)] for index in range(7)]
    uniforms = [0.1 * index for index in range(7)]
    together = draw(rows, samplings, uniforms)
    alone = [draw(rows[i : i + 1], samplings[i : i + 1], uniforms[i : i + 1]) for i in range(7)]
    assert together == ([tokens[0] for tokens, _ in alone], [logprobs[0] for _, logprobs in alone])


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_interval_draw_what_can_be_drawn(uniform):
    rows = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf], [-200.0, 0.0, 0.0, -200.0]])
    tokens, logprobs = draw(rows, [Sampling(), Sampling(top_p=0.9)], [uniform] * 2)
    assert all(token in (1, 2) for token in tokens)
    assert logprobs == pytest.approx([math.log(0.5)] * 2)


def test_a_row_of_logits_that_are_not_finite_fails_alone():
    good = torch.tensor([0.0, 2.0, 1.0])
    samplings = [Sampling(), Sampling(temperature=0), Sampling(top_p=0.5)]
    for sampling, value in product(samplings, [torch.nan, torch.inf]):
        rows = torch.stack([good, torch.tensor([0.0, value, 1.0]), good])
        tokens, logprobs = draw(rows, [sampling] * 3, [0.2, 0.5, 0.9])
        assert math.isnan(logprobs[1])
        alone = [draw(good[None], [sampling], [uniform]) for uniform in (0.2, 0.9)]
        assert [tokens[0], tokens[2]] == [token for (token,), _ in alone]
        assert [logprobs[0], logprobs[2]] == [logprob for _, (logprob,) in alone]


def test_rows_drawn_in_chunks_get_what_they_get_at_once(monkeypatch):
    logits_BV = torch.randn(21, 1003, generator=torch.Generator().manual_seed(0)) * 3
    samplings = [Sampling(temperature=(0.0, 0.7, 1.0)[row % 3], top_k=(0, 40)[row % 2]) for row in range(21)]
    uniforms = [random.Random(row).random() for row in range(21)]
    chunks = draw(logits_BV, samplings, uniforms)
    monkeypatch.setattr("components.inference.transformers.sampling.CHUNK_ROWS", 21)
    assert draw(logits_BV, samplings, uniforms) == chunks
