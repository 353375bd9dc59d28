"""Credit of roles: each token is credited with the reward of its role, compared within the role."""

from __future__ import annotations

import pytest

from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.policy_gradient.trainer import prepare
from components.trajectories.roles import restrict
from components.trajectories.schema import Trajectory
from tests.algorithms.builders import make_context, make_history, make_policy, make_trajectory

ROLES = GRPOSpec(credit="roles", baseline="group", scale="none")


def episode(sample: int, planner: float, worker: float | None) -> Trajectory:
    """Return an episode of a planner with one turn and, with a reward of it, a worker with two."""
    histories = [make_history([(False, [5]), (True, [7 + sample, 8])], [-1.0] * 2)]
    histories[0].agent = "planner"
    rewards = [planner]
    if worker is not None:
        parts = [(False, [6]), (True, [7 + sample]), (False, [9]), (True, [8])]
        histories.append(make_history(parts, [-1.0] * 2))
        histories[1].agent = "worker"
        rewards += [0.0, worker]
    result = make_trajectory("s", sample, histories, 0.0)
    result.step_rewards = rewards
    return result


def credited(base_dir, tmp_path, group: list[Trajectory]) -> list[list[float]]:
    _, learning = prepare(ROLES, make_context(make_policy(base_dir), None, group, scratch=tmp_path))
    return [learning.advantages[trajectory.id] for trajectory in group]


def test_each_role_is_compared_with_itself(base_dir, tmp_path):
    group = [episode(0, 1.0, 0.25), episode(1, 0.0, 0.75)]
    assert credited(base_dir, tmp_path, group) == [[0.5, 0.5, -0.25, -0.25], [-0.5, -0.5, 0.25, 0.25]]


def test_roles_with_equal_sums_still_learn(base_dir, tmp_path):
    group = [episode(0, 1.0, 0.0), episode(1, 0.0, 1.0)]
    assert credited(base_dir, tmp_path, group)[0] == [0.5, 0.5, -0.5, -0.5]


def test_an_episode_without_a_worker_does_not_count_among_workers(base_dir, tmp_path):
    group = [episode(0, 1.0, 1.0), episode(1, 0.0, 0.0), episode(2, 0.5, None)]
    assert credited(base_dir, tmp_path, group) == [[0.5, 0.5, 0.5, 0.5], [-0.5, -0.5, -0.5, -0.5], [0.0, 0.0]]


def test_a_role_that_is_trained_alone_has_the_same_advantages(base_dir, tmp_path):
    group = [episode(0, 1.0, 0.25), episode(1, 0.0, 0.75)]
    workers = [restrict(trajectory, ["worker"]) for trajectory in group]
    assert credited(base_dir, tmp_path, workers) == [[-0.25, -0.25], [0.25, 0.25]]


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"kl_coefficient": 0.1, "kl_in": "reward"}, "algorithm.kl_in"),
        ({"overlong": 10}, "algorithm.overlong"),
        ({"costs": {"turns": {"limit": 1.0}}}, "algorithm.costs"),
        ({"reward_cap": 1.0}, "algorithm.reward_cap"),
    ],
)
def test_options_of_the_whole_episode_are_refused(options, path):
    assert [problem.path for problem in GRPOSpec(credit="roles", **options).problems()] == [path]
