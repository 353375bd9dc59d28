"""Learning rates compared with those of transformers and with numbers computed by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from components.algorithms.loop import schedule
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.trainer import Rounds


def shares(spec: GRPOSpec, lengths: list[int]) -> list[float]:
    """Return the schedule factors of all steps of rounds with the given numbers of steps."""
    values, step = [], 0
    for number, length in enumerate(lengths, 1):
        for index in range(length):
            step += 1
            values.append(schedule.share(spec, step, Rounds(number, len(lengths)), index / length))
    return values


@pytest.mark.parametrize(
    ("decay", "theirs"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_over_equal_rounds_it_falls_as_in_transformers(decay, theirs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = theirs(optimizer, num_warmup_steps=0, num_training_steps=12)
    expected = []
    for _ in range(12):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert shares(GRPOSpec(decay=decay), [4, 4, 4]) == pytest.approx(expected)


def test_a_round_counts_the_same_however_many_steps_it_takes():
    assert shares(GRPOSpec(decay="linear"), [1, 2, 0, 4]) == pytest.approx(
        [1, 3 / 4, 5 / 8, 1 / 4, 3 / 16, 1 / 8, 1 / 16]
    )


def test_the_rise_multiplies_the_fall():
    assert shares(GRPOSpec(warmup_steps=4, decay="linear"), [2, 2]) == pytest.approx([0.25, 0.375, 0.375, 0.25])


def test_without_decay_the_rate_rises_and_stays():
    assert shares(GRPOSpec(warmup_steps=2), [3, 3]) == [0.5, 1, 1, 1, 1, 1]
    assert shares(GRPOSpec(), [1]) == [1.0]
