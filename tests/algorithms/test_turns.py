"""Turn-level credit: the compared turns, and each form compared with its formula written out."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.algorithms.policy_gradient.advantages import EPSILON
from components.algorithms.policy_gradient.spec import GRPOSpec, RLOOSpec
from components.algorithms.policy_gradient.trainer import prepare
from components.algorithms.policy_gradient.turn_credit import process_advantages, turn_advantages, turn_states
from components.trajectories.schema import Trajectory
from tests.algorithms.builders import make_context, make_history, make_policy, make_trajectory

REWARDS = st.lists(st.floats(-10, 10).map(lambda value: round(value, 3)), min_size=1, max_size=5)
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


@settings(deadline=None)
@given(st.lists(REWARDS, min_size=2, max_size=5), st.floats(0, 1))
def test_process_supervision_written_out(rewards, discount):
    """arXiv:2402.03300, section 4.1.3: r̃ = (r - mean(R)) / std(R); the advantage is the sum of r̃ from the turn on."""
    everything = [value for episode_rewards in rewards for value in episode_rewards]
    mean, deviation = statistics.fmean(everything), statistics.pstdev(everything)
    if deviation < 1e-3 or all(step_rewards == rewards[0] for step_rewards in rewards):
        return
    [actual] = process_advantages([rewards], baseline="group", scale="group", discount=discount)
    for step_rewards, values in zip(rewards, actual, strict=True):
        normalised = [(value - mean) / (deviation + EPSILON) for value in step_rewards]
        for turn, value in enumerate(values):
            expected = sum(discount**distance * reward for distance, reward in enumerate(normalised[turn:]))
            assert value == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_states_written_out():
    """GiGPO (arXiv:2505.10978, eq. 4, 7 and 8): the episode's advantage plus the advantage among turns in the same
    state."""
    group = [
        episode(0, [0.0, 0.0, 1.0], ["hall", "door", "end"]),
        episode(1, [0.0, 0.0, 0.0], ["door", "hall", "end"]),
        episode(2, [0.0, 0.5, 0.0], ["hall", "hall", "end"]),
    ]
    # The first state is the task; the others are the observations before the turn.
    states = [["task", "hall", "door"], ["task", "door", "hall"], ["task", "hall", "hall"]]
    returns = [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    weight = 0.7
    expected = []
    totals = [turn_returns[0] for turn_returns in returns]
    by_state: dict[str, list[float]] = defaultdict(list)
    for names, values in zip(states, returns, strict=True):
        for name, value in zip(names, values, strict=True):
            by_state[name].append(value)

    def normalised(value: float, values: list[float]) -> float:
        return (value - statistics.fmean(values)) / (statistics.pstdev(values) + EPSILON)

    for names, values in zip(states, returns, strict=True):
        expected.append(
            [
                normalised(values[0], totals) + weight * normalised(value, by_state[name])
                for name, value in zip(names, values, strict=True)
            ]
        )
    options = {"turn_baseline": "state", "baseline": "group", "scale": "group", "state_weight": weight}
    [actual] = turn_advantages([returns], [totals], [group], **options)
    assert actual == [pytest.approx(values) for values in expected]
    named = {
        state: name for trajectory, names in zip(group, states, strict=True)
        for state, name in zip(turn_states(trajectory), names, strict=True)
    }  # fmt: skip
    assert sorted(named.values()) == ["door", "hall", "task"]


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
