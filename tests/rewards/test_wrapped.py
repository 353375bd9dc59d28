"""Clipped, discounted and shaped rewards, against their formulas."""

from __future__ import annotations

import math

import pytest

from components.errors import SpecError
from components.rewards import judge as judging
from components.rewards.composition.clipped import Clipped
from components.rewards.composition.shaped import Shaped, signed_log, tanh
from components.rewards.rules.discounted import Discounted
from components.rewards.rules.potential import Potential
from components.rewards.rules.returned import Returned
from components.specs import Target
from components.trajectories.schema import Score
from tests.trajectories.builders import episode


def judged(reward, *trajectories):
    return list(judging.judge(reward, trajectories or [episode()]))


def says(reward, *steps):
    return lambda trajectory: Score(trajectory.id, reward, {"deep": 1.0}, list(steps))


class TestClipped:
    def test_it_is_the_formula(self, subtests):
        for value in [-3.0, -1.0, 0.5, 1.0, 9.0]:
            for low, high in [(None, 1.0), (-1.0, None), (-1.0, 1.0)]:
                with subtests.test(low=low, high=high, value=value):
                    (score,) = judged(Clipped(says(value), low, high))
                    assert score.reward == min(
                        math.inf if high is None else high, max(-math.inf if low is None else low, value)
                    )
                    assert score.components == {"reward": value, "reward/deep": 1.0}

    def test_what_it_changes_falls_to_the_last_step(self):
        (score,) = judged(Clipped(says(5.0, 2.0, 3.0), high=1.0))
        assert score.step_rewards == [2.0, -1.0]

    def test_steps_may_be_bounded_each(self):
        (score,) = judged(Clipped(says(5.0, 2.0, 3.5, -0.5), high=2.5, low=0.0, of="steps"))
        assert (score.reward, score.step_rewards) == (4.5, [2.0, 2.5, 0.0])
        (score,) = judged(Clipped(says(5.0), high=1.0, of="steps"))
        assert score.failure.message == "reward.of=steps needs step rewards, and this reward gave none"

    def test_bounds_that_are_none_are_refused(self, subtests):
        for low, high in [(None, None), (2.0, 1.0)]:
            with subtests.test(low=low), pytest.raises(SpecError, match="reward"):
                Clipped(says(1.0), low, high)


class TestDiscounted:
    def test_it_is_the_formula(self, subtests):
        for gamma in [0.0, 0.5, 0.99, 1.0]:
            with subtests.test(gamma=gamma):
                steps = [1.0, -2.0, 4.0]
                (score,) = judged(Discounted(says(3.0, *steps), gamma))
                assert score.reward == pytest.approx(1.0 - 2.0 * gamma + 4.0 * gamma**2)
                assert score.step_rewards == steps

    def test_of_what_the_environment_gave(self):
        sample = episode()
        sample.step_rewards = [0.0, 1.0]
        assert judged(Discounted(Returned(), 0.5), sample)[0].reward == 0.5

    def test_without_step_rewards_it_is_unscored(self):
        assert "needs step rewards" in judged(Discounted(says(1.0)))[0].failure.message


class TestShaped:
    def test_it_is_the_function_of_the_value(self):
        (score,) = judged(Shaped(says(3.0, 1.0, 2.0), lambda value: value**2))
        assert (score.reward, score.step_rewards, score.components["reward"]) == (9.0, [1.0, 8.0], 3.0)

    def test_a_function_may_be_configured(self):
        target = {
            "_target_": "components.rewards.composition.shaped.Shaped",
            "reward": {"_target_": "components.rewards.rules.returned.Returned"},
        }
        built = Target.model_validate(
            {**target, "function": "components.rewards.composition.shaped.signed_log"}
        ).build()
        assert judged(built, episode(outcome={"reward": -4.0}))[0].reward == pytest.approx(-math.log(5.0))
        with_scale = {"_target_": "components.rewards.composition.shaped.tanh", "scale": 2.0}
        built = Target.model_validate({**target, "function": with_scale}).build()
        assert judged(built, episode(outcome={"reward": 1.0}))[0].reward == pytest.approx(math.tanh(0.5))

    def test_shapes_are_odd_and_monotone(self):
        for shape in (tanh, signed_log):
            values = [shape(x / 10) for x in range(-30, 31)]
            assert values == sorted(values)
            assert shape(-0.7) == -shape(0.7)

    def test_what_the_function_does_wrong_leaves_the_episode_unscored(self, subtests):
        for function, said in [
            (lambda value: 1 / 0, "division"),
            (lambda value: "x", "'x' (str)"),
            (lambda value: math.nan, "finite"),
        ]:
            with subtests.test(said=said):
                assert said in judged(Shaped(says(1.0), function))[0].failure.message

    def test_an_async_function_is_refused(self):
        async def later(value):
            return value

        with pytest.raises(SpecError, match=r"reward\.function: is async"):
            Shaped(says(1.0), later)


class TestPotential:
    @pytest.mark.parametrize("gamma", [0.5, 0.9, 1.0])
    def test_what_is_earned_on_the_way_is_given_back(self, gamma):
        steps, potentials = [0.5, 0.0, 2.0], [0.25, 1.0, -3.0]
        (score,) = judged(Potential(says(2.5, *steps), lambda trajectory: potentials, gamma))
        returns = [sum(gamma**t * step for t, step in enumerate(of)) for of in (score.step_rewards, steps)]
        assert returns[0] == pytest.approx(returns[1] - potentials[0])
        assert score.reward == pytest.approx(sum(score.step_rewards))
        assert score.components["potential"] == pytest.approx(score.reward - 2.5)

    def test_a_reward_without_steps_counts_at_the_last_turn(self):
        (score,) = judged(Potential(says(1.0), lambda trajectory: [0.0, 0.5]))
        assert score.step_rewards == [0.5, 0.5]

    @pytest.mark.parametrize(
        ("found", "said"), [([], "nothing"), ([1.0], "1 potentials for 2"), (["x", 1.0], "'x'"), (3, "not iterable")]
    )
    def test_potentials_that_do_not_fit_leave_the_episode_unscored(self, found, said):
        assert said in judged(Potential(says(1.0, 0.5, 0.5), lambda trajectory: found))[0].failure.message
