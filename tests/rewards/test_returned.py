"""Reward reported by the environment."""

from __future__ import annotations

from components.rewards.rules.returned import Returned
from components.trajectories.schema import Scenario, Trajectory


def returned_episode(outcome: dict, rewards: list[float]) -> Trajectory:
    return Trajectory("a/0", Scenario("a", {}, "train"), 0, [], outcome=outcome, step_rewards=rewards)


def test_what_was_given(subtests):
    for outcome, rewards, expected in [
        ({"reward": 0.25}, [1.0, 2.0], 0.25),
        ({"reward": 0}, [1.0], 0.0),
        ({}, [0.5, -0.25], 0.25),
        ({"success": True}, [0.0, 0.0], 0.0),
    ]:
        with subtests.test(outcome=outcome):
            (score,) = Returned().score_group([returned_episode(outcome, rewards)])
            assert score.reward == expected
            assert score.failure is None


def test_nothing_given_is_unscored(subtests):
    for outcome in [{}, {"reward": None}, {"reward": "1"}, {"reward": float("nan")}]:
        with subtests.test(outcome=outcome):
            (score,) = Returned().score_group([returned_episode(outcome, [])])
            assert score.reward is None
            assert "step rewards" in score.failure.message
