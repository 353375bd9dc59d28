"""Learning rates against numbers worked out by hand."""

from __future__ import annotations

import pytest

from components.algorithms import schedule
from components.algorithms.spec import GRPOSpec

SHARES = {
    "none": [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0],
    "linear": [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0],
    "cosine": [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0],
}


@pytest.mark.parametrize("decay", SHARES)
def test_the_rate_rises_and_falls(decay):
    spec = GRPOSpec(warmup_steps=4, decay=decay, decay_steps=2)
    assert [schedule.share(spec, step) for step in range(1, 8)] == pytest.approx(SHARES[decay])


def test_half_a_cosine_falls_slowly_first():
    spec = GRPOSpec(decay="cosine", decay_steps=4)
    assert [schedule.share(spec, step) for step in (2, 4)] == pytest.approx([0.5 + 0.5**1.5, 0.5 - 0.5**1.5])


def test_without_a_warmup_the_first_step_is_a_full_one():
    assert schedule.share(GRPOSpec(), 1) == 1.0
