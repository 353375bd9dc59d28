"""Step rewards from continuations: they add up to the success minus the initial expectation."""

from __future__ import annotations

import pytest

from components.rewards.judge import judge
from components.rewards.rules.continued import Continued
from components.trajectories.schema import History, Scenario, Trajectory
from components.trajectories.step_labels import CONTINUED, written


def episode(sample: int, success: bool, labels: list[float]) -> Trajectory:
    metrics = {"turns": 2.0, **written(CONTINUED, labels)}
    return Trajectory(
        f"s/{sample}", Scenario("s", {}, "train"), sample, [History([])], outcome={"success": success}, metrics=metrics
    )


def test_a_step_is_worth_what_it_changed():
    good, bad = judge(Continued(), [episode(0, True, [0.75, 1.0]), episode(1, False, [0.25, 0.0])])
    assert (good.reward, bad.reward) == (1.0, 0.0)
    assert good.step_rewards == pytest.approx([0.25, 0.25])
    assert bad.step_rewards == pytest.approx([-0.25, -0.25])


def test_an_episode_that_was_not_continued_has_its_success():
    (score,) = judge(Continued(), [episode(0, True, [])])
    assert (score.reward, score.step_rewards) == (1.0, [])
