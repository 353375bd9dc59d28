"""Turn-level credit: the turns that are compared. `test_gradient_matrix` compares each form with its formula."""

from __future__ import annotations

from itertools import product

import pytest

from components.algorithms.policy_gradient.advantages import turn_advantages
from components.algorithms.policy_gradient.spec import GRPOSpec, RLOOSpec
from components.algorithms.policy_gradient.trainer import prepare
from components.trajectories.schema import Trajectory
from tests.algorithms.builders import make_context, make_history, make_policy, make_trajectory

FORMS = ["index", "state", "process"]


def episode(sample: int, step_rewards: list[float], observations: list[str] | None = None) -> Trajectory:
    parts: list = [(False, [5, 6])]
    for turn in range(len(step_rewards)):
        parts += [(True, [7 + sample, 8 + turn]), (False, [9])]
    result = make_trajectory("s", sample, [make_history(parts, [-1.0] * 2 * len(step_rewards))], 1.0)
    result.step_rewards = step_rewards
    spoken = iter(["task", *(observations or [f"turn {turn}" for turn in range(len(step_rewards))])])
    for message in result.histories[0].messages:
        if message.role == "user":
            message.content = next(spoken)
    return result


def token_advantages(base_dir, tmp_path, spec: GRPOSpec, group: list[Trajectory]) -> list[list[float]]:
    """Return the advantage of the first token of each turn."""
    _, learning = prepare(spec, make_context(make_policy(base_dir), None, group, scratch=tmp_path))
    return [learning.advantages[trajectory.id][::2] for trajectory in group]


def test_identical_episodes_have_no_advantage(base_dir, tmp_path):
    """With a single baseline for all turns, four episodes with a reward of 1 in each of four turns would have
    advantages of 1.34, 0.45, -0.45 and -1.34."""
    policy = make_policy(base_dir)
    series = [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0], [-2.0, 0.0, 5.0]]
    for form, spec, rewards in product(FORMS, [GRPOSpec, RLOOSpec], series):
        group = [episode(sample, list(rewards)) for sample in range(4)]
        settings = spec(credit="turns", turn_baseline=form, kl_coefficient=0.0)
        remaining, learning = prepare(settings, make_context(policy, None, group, scratch=tmp_path))
        assert remaining == [], (form, spec, rewards)
        assert all(value == 0.0 for values in learning.advantages.values() for value in values), (form, spec, rewards)


def test_a_good_late_turn_is_not_pushed_down(base_dir, tmp_path):
    """Both episodes get a reward in every turn; the first gets more in the last turn."""
    group = [episode(0, [1.0, 1.0, 2.0]), episode(1, [1.0, 1.0, 1.0])]
    better, worse = token_advantages(base_dir, tmp_path, GRPOSpec(credit="turns"), group)
    assert better == pytest.approx([1.0] * 3, abs=1e-5)
    assert worse == pytest.approx([-1.0] * 3, abs=1e-5)


def test_a_state_that_occurs_once_has_the_advantage_of_its_episode(base_dir, tmp_path):
    group = [episode(0, [0.0, 1.0], ["left", "end"]), episode(1, [0.0, 0.0], ["right", "end"])]
    spec = GRPOSpec(credit="turns", turn_baseline="state", state_weight=5.0, scale="none")
    better, worse = token_advantages(base_dir, tmp_path, spec, group)
    assert better == pytest.approx([0.5 + 5.0 * 0.5, 0.5])
    assert worse == pytest.approx([-0.5 - 5.0 * 0.5, -0.5])


def test_the_total_return_of_an_episode_is_not_discounted(base_dir, tmp_path):
    """GiGPO, eq. 3: both episodes get 1 in total, the first one later. With discounting it would have a lower episode
    advantage."""
    group = [episode(0, [0.0, 1.0], ["left", "end"]), episode(1, [1.0, 0.0], ["right", "end"])]
    spec = GRPOSpec(credit="turns", turn_baseline="state", state_weight=0.0, scale="none", discount=0.5)
    assert token_advantages(base_dir, tmp_path, spec, group) == [[0.0, 0.0], [0.0, 0.0]]


def test_every_turn_answers_for_the_length_of_its_episode(base_dir, tmp_path):
    """The length penalty is part of the last step reward: it reduces the return of each turn of the second episode,
    whose 4 tokens reach the full penalty, by 1."""
    plain, long = episode(0, [0.0, 0.0]), episode(1, [0.0, 0.0])
    plain.histories[0].messages[3].span = None  # one turn fewer: 2 tokens
    plain.step_rewards = [0.0]
    policy = make_policy(base_dir)
    for form in FORMS:
        spec = GRPOSpec(credit="turns", turn_baseline=form, scale="none", overlong=4, overlong_buffer=2)
        _, learning = prepare(spec, make_context(policy, None, [plain, long], scratch=tmp_path))
        assert learning.advantages[plain.id][0] > 0 > learning.advantages[long.id][0], form


@pytest.mark.parametrize("baseline", ["group", "batch"])
def test_tokens_of_a_single_episode_are_not_compared_with_each_other(base_dir, tmp_path, baseline):
    """They differ only by the KL penalty, which would be divided by its own standard deviation to an advantage of 1,
    however small."""
    group = [episode(0, [0.0, 1.0]), episode(1, [0.5])]
    spec = GRPOSpec(
        credit="turns", baseline=baseline, scale=baseline, kl_coefficient=1e-3, kl_in="token_rewards", kl_estimator="k1"
    )
    _, learning = prepare(spec, make_context(make_policy(base_dir), None, group, scratch=tmp_path))
    first, second = (learning.advantages[trajectory.id] for trajectory in group)
    assert first[2:] == [0.0, 0.0]
    assert first[0] > 0 > second[0]


def test_an_episode_of_no_turns_is_no_obstacle():
    silent = episode(2, [])
    options = {"baseline": "group", "scale": "none", "state_weight": 1.0}
    for form in ("index", "state"):
        group = [episode(0, [1.0]), episode(1, [0.0]), silent]
        [actual] = turn_advantages([[[1.0], [0.0], []]], [[1.0, 0.0, 0.0]], [group], turn_baseline=form, **options)
        assert [len(values) for values in actual] == [1, 1, 0]
