"""Rewards made of rewards: every number against the formula, every part seen, nothing lost that was said or paid."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from components.errors import ResourceError, SpecError
from components.rewards import judge as judging
from components.rewards.composition.combined import Combined, Part
from components.rewards.composition.composed import NOT_APPLICABLE, not_applicable
from components.rewards.protocol import ModelReward
from components.rewards.rules.outcome import Outcome
from components.trajectories.schema import Failure, Score
from tests.trajectories.builders import FAILURE, episode


def judge(reward, trajectories, **options):
    return list(judging.judge(reward, trajectories, **options))


def combined(how="sum", ask="passed", **parts):
    return Combined(
        {name: part if isinstance(part, Part) else Part(reward=part) for name, part in parts.items()}, how, ask
    )


def says(reward, **more):
    """Return a reward with the same Score for every trajectory."""
    return lambda trajectory: Score(trajectory.id, reward, **more)


class Asked:
    """Plain reward that records its trajectories."""

    def __init__(self, answer):
        self.answer = answer
        self.seen = []

    def __call__(self, trajectory):
        self.seen.append(trajectory.id)
        return self.answer(trajectory)


def test_a_sum_is_weighted_and_shows_its_parts():
    rows = [episode("a", 0, success=True, turns=3.0), episode("a", 1, success=False, turns=5.0)]
    reward = combined(task=Part(reward=Outcome(turn_cost=0.1), weight=2.0), size=Part(reward=says(4.0), weight=-0.25))
    first, second = judge(reward, rows)
    assert first.reward == pytest.approx(2.0 * (1.0 - 0.1 * 3) - 0.25 * 4.0)
    assert second.reward == pytest.approx(2.0 * (0.0 - 0.1 * 5) - 0.25 * 4.0)
    assert first.components == pytest.approx({"task": 0.7, "task/success": 1.0, "task/turns": -0.3, "size": 4.0})


def test_a_product_multiplies():
    (score,) = judge(combined("product", a=says(3.0), b=says(-0.5), c=says(4.0)), [episode()])
    assert score.reward == 3.0 * -0.5 * 4.0
    assert score.components == {"a": 3.0, "b": -0.5, "c": 4.0}


def test_what_parts_say_and_cost_is_joined():
    reward = combined(
        a=says(1.0, explanation="well done", cost=0.25), b=says(1.0), c=says(1.0, explanation="short", cost=0.5)
    )
    (score,) = judge(reward, [episode()])
    assert score.explanation == "a: well done\nc: short"
    assert score.cost == 0.75


def test_compositions_nest_and_every_level_is_seen():
    inner = combined(x=Part(reward=says(2.0, components={"deep": 7.0}, explanation="so"), weight=3.0))
    (score,) = judge(combined(outer=inner, flat=says(1.0)), [episode()])
    assert score.reward == 7.0
    assert score.components == {"outer": 6.0, "outer/x": 2.0, "outer/x/deep": 7.0, "flat": 1.0}
    assert score.explanation == "outer: x: so"


class TestSteps:
    """Step rewards."""

    def test_those_of_a_sum_add_up_and_what_has_none_falls_to_the_last(self):
        steps = says(1.0, step_rewards=[0.25, 0.25, 0.5])
        reward = combined(a=Part(reward=steps, weight=2.0), b=says(3.0, step_rewards=[1.0, 1.0, 1.0]), c=says(5.0))
        (score,) = judge(reward, [episode()])
        assert score.step_rewards == [2 * 0.25 + 1, 2 * 0.25 + 1, 2 * 0.5 + 1 + 5]
        assert score.reward == sum(score.step_rewards) == 10.0

    def test_without_any_there_are_none(self):
        assert judge(combined(a=says(1.0)), [episode()])[0].step_rewards == []

    def test_of_a_product_they_are_those_of_the_one_part_times_the_others(self):
        reward = combined("product", a=says(3.0, step_rewards=[1.0, 2.0]), b=says(0.5), c=says(4.0))
        assert judge(reward, [episode()])[0].step_rewards == [2.0, 4.0]

    def test_parts_that_differ_in_number_leave_the_episode_unscored(self):
        reward = combined(a=says(1.0, step_rewards=[1.0]), b=says(1.0, step_rewards=[0.5, 0.5]))
        (score,) = judge(reward, [episode()])
        assert (score.reward, score.failure.message) == (
            None,
            "the parts give 1 and 2 step rewards; expected as many each",
        )

    def test_a_product_of_two_parts_with_steps_says_to_take_a_sum(self):
        reward = combined("product", a=says(1.0, step_rewards=[1.0]), b=says(1.0, step_rewards=[1.0]))
        assert "take sum" in judge(reward, [episode()])[0].failure.message

    def test_a_part_that_does_not_count_brings_no_steps(self):
        reward = combined(a=Part(reward=says(1.0, step_rewards=[1.0, 2.0]), weight=0.0), b=says(1.0))
        assert judge(reward, [episode()])[0].step_rewards == []


class TestUnscored:
    """Part without a score."""

    def test_it_leaves_the_whole_unscored_and_is_named_and_what_was_paid_is_counted(self):
        failure = Failure("judge", "Timeout", "no answer in 60 s")
        broken = combined(a=says(1.0, explanation="fine", cost=0.5), b=says(None, failure=failure, cost=0.25))
        (score,) = judge(broken, [episode()])
        assert score.reward is None
        assert score.failure == Failure("judge", "Timeout", "b: no answer in 60 s")
        assert (score.cost, score.explanation, score.components) == (0.75, "a: fine", {"a": 1.0})

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (lambda _: {}["x"], "bad: 'x' (tests/rewards/test_combined.py:"),
            (lambda _: float("nan"), "bad: the reward is nan, expected a finite number"),
            (lambda _: "1.0", "bad: the reward is '1.0' (str), expected a number"),
            (lambda _: None, "bad: the reward is None (NoneType), expected a number"),
        ],
    )
    def test_whatever_a_part_does_wrong_stays_with_its_trajectory(self, answer, said):
        rows = [episode("a", 0), episode("a", 1)]
        bad = lambda trajectory: answer(trajectory) if trajectory.sample else 1.0  # noqa: E731
        first, second = judge(combined(good=says(1.0), bad=bad), rows)
        assert first.reward == 2.0
        assert second.reward is None
        assert second.failure.message.startswith(said)

    def test_a_sum_that_is_no_finite_number_is_unscored(self):
        assert "finite" in judge(combined(a=says(1e308), b=says(1e308)), [episode()])[0].failure.message

    def test_a_missing_key_passes_through(self):
        def reward(_):
            raise ResourceError("set JUDGE_API_KEY")

        with pytest.raises(ResourceError):
            judge(combined(a=says(1.0), b=reward), [episode()])

    def test_a_failed_episode_is_shown_to_no_part(self):
        part = Asked(lambda _: 1.0)
        scores = judge(combined(a=part), [episode("a", 0, failure=FAILURE), episode("a", 1)])
        assert scores[0] == Score("a/0", None, failure=FAILURE)
        assert part.seen == ["a/1"]

    def test_an_optional_part_that_has_nothing_to_say_is_left_out(self):
        silent = Part(reward=lambda trajectory: not_applicable(trajectory, "no code"), optional=True, weight=5.0)
        (score,) = judge(combined(a=says(2.0), b=silent), [episode()])
        assert (score.reward, score.components) == (2.0, {"a": 2.0})
        (alone,) = judge(combined(b=silent), [episode()])
        assert (alone.reward, alone.failure.kind) == (None, NOT_APPLICABLE)
        (strict,) = judge(combined(a=says(2.0), b=silent.reward), [episode()])
        assert (strict.reward, strict.failure.message) == (None, "b: no code")

    def test_an_optional_part_that_breaks_is_not_left_out(self):
        broken = Part(reward=lambda trajectory: 1 / 0, optional=True)
        assert judge(combined(a=says(2.0), b=broken), [episode()])[0].failure.kind == "ZeroDivisionError"


class TestNeeds:
    """Part that needs others to reach a threshold."""

    def rows(self):
        return [episode("a", i, success=i % 2 == 0) for i in range(4)]

    def test_it_counts_where_the_other_passes_and_is_asked_only_there(self):
        style = Asked(lambda trajectory: 0.5)
        reward = combined(task=Outcome(), style=Part(reward=style, needs={"task": 1.0}))
        scores = judge(reward, self.rows())
        assert [score.reward for score in scores] == [1.5, 0.0, 1.5, 0.0]
        assert style.seen == ["a/0", "a/2"]
        assert "style" not in scores[1].components
        assert scores[1].explanation == "style: does not count, as task is 0 and 1 is needed"

    def test_asked_about_all_it_is_seen_and_does_not_count(self):
        style = Asked(lambda trajectory: 0.5)
        reward = combined(ask="all", task=Outcome(), style=Part(reward=style, needs={"task": 1.0}))
        scores = judge(reward, self.rows())
        assert [score.reward for score in scores] == [1.5, 0.0, 1.5, 0.0]
        assert scores[1].components["style"] == 0.5

    def test_a_gate_may_itself_not_count(self):
        reward = combined(gate=Part(reward=Outcome(), weight=0.0), style=Part(reward=says(0.5), needs={"gate": 0.5}))
        assert [score.reward for score in judge(reward, self.rows())] == [0.5, 0.0, 0.5, 0.0]

    def test_what_does_not_count_is_no_gate_for_others(self):
        for ask in ("passed", "all"):
            chain = combined(
                ask=ask,
                c=Part(reward=says(1.0), needs={"b": 0.5}),
                b=Part(reward=says(1.0), needs={"a": 0.5}),
                a=Part(reward=Outcome(), weight=0.0),
            )
            assert [score.reward for score in judge(chain, self.rows())] == [2.0, 0.0, 2.0, 0.0]

    def test_in_a_product_it_makes_zero(self):
        reward = combined("product", task=says(0.5), style=Part(reward=says(3.0), needs={"task": 0.6}))
        assert judge(reward, [episode()])[0].reward == 0.0

    def test_a_judge_of_groups_sees_those_that_passed(self):
        class Ranks:
            def score_group(self, group):
                return [Score(trajectory.id, float(len(group))) for trajectory in group]

        reward = combined(task=Part(reward=Outcome(), weight=0), rank=Part(reward=Ranks(), needs={"task": 1}))
        assert [score.reward for score in judge(reward, self.rows())] == [2.0, 0.0, 2.0, 0.0]


# Parts that wait


class Slow:
    """Reward that waits and counts concurrent calls."""

    now = most = 0
    lock = threading.Lock()

    def __init__(self, value):
        self.value = value

    def begin(self, by):
        with Slow.lock:
            Slow.now += by
            Slow.most = max(Slow.most, Slow.now)


class Awaited(Slow):
    async def __call__(self, trajectory):
        self.begin(1)
        await asyncio.sleep(0.02)
        self.begin(-1)
        return self.value + trajectory.sample


class Blocking(Slow):
    blocking = True

    def __call__(self, trajectory):
        self.begin(1)
        time.sleep(0.02)
        self.begin(-1)
        return self.value + trajectory.sample


def test_parts_that_wait_are_asked_at_once_and_the_scores_are_the_same(subtests):
    for kind in [Awaited, Blocking]:
        with subtests.test(kind=kind):
            rows = [episode(f"s{group}", sample) for group in range(8) for sample in range(2)]
            Slow.most = 0
            reward = combined(a=kind(1.0), b=Part(reward=combined(c=kind(2.0), d=says(0.5)), weight=2.0))
            assert reward.waits
            scores = judge(reward, rows, concurrency=4)
            assert [score.reward for score in scores] == [(1 + row.sample) + 2 * (2 + row.sample + 0.5) for row in rows]
            assert 5 <= Slow.most <= 8  # of four groups at once, two parts each
            assert judge(reward, rows, concurrency=1) == scores


def test_of_plain_functions_it_stays_plain():
    where = []
    reward = combined(a=lambda trajectory: where.append(threading.current_thread()) or 1.0, b=Outcome())
    assert not reward.waits
    judge(reward, [episode()])
    assert where == [threading.main_thread()]


def test_a_slow_plain_part_beside_one_that_waits_holds_up_no_loop_and_is_asked_one_by_one():
    """The plain part blocks until the parts that wait have ended for all episodes; in the loop it would deadlock."""
    waited = []
    all_waited = threading.Event()

    class Plain(Slow):
        def __call__(self, trajectory):
            self.begin(1)
            free = all_waited.wait(600)
            self.begin(-1)
            return float(free)

    async def awaited(trajectory):
        await asyncio.sleep(0.005)
        waited.append(trajectory.id)
        if len(waited) == 30:
            all_waited.set()
        return 1.0

    Slow.most = 0
    scores = judge(combined(a=Plain(0), b=awaited), [episode(f"s{i}") for i in range(30)], concurrency=30)
    assert Slow.most == 1
    assert [score.components["a"] for score in scores] == [1.0] * 30


def test_a_reward_that_computes_with_a_model_is_told_of_it_wherever_it_stands():
    class Model:
        def use(self, *means):
            self.means = means

        def score_group(self, group):
            return [Score(trajectory.id, 1.0) for trajectory in group]

    model = Model()
    combined(a=combined(b=model), c=Outcome()).use("means")
    assert model.means == ("means",)
    assert isinstance(combined(a=model), ModelReward)
    assert not isinstance(combined(a=combined(b=Outcome())), ModelReward)


def test_the_key_has_the_model_only_where_one_computes():
    from components.specs import Target

    plain = {"_target_": "components.rewards.rules.outcome.Outcome"}
    learned = {"_target_": "components.rewards.judges.learned.Learned", "path": "folder"}
    for parts, computes in (
        ({"a": {"reward": plain}}, False),
        ({"a": {"reward": plain}, "b": {"reward": learned}}, True),
    ):
        target = Target.model_validate({"_target_": "components.rewards.composition.combined.Combined", "parts": parts})
        assert target.has("use") is computes


# Bad input


def test_parts_that_do_not_go_together_are_refused(subtests):
    for parts, path, said in [
        ({}, "reward.parts", "is empty"),
        ({"a/b": Part(reward=says(1))}, "reward.parts.a/b", "names no part"),
        ({"0": Part(reward=says(1))}, "reward.parts.0", "names no part"),
        ({"a": Part(reward=3)}, "reward.parts.a", "int is no reward"),
        ({"a": Part(reward=says(1), weight=0)}, "reward.parts", "all weights are 0"),
        ({"style": Part(reward=says(1), needs={"styel": 1})}, "reward.parts.style.needs", "no other part 'styel'"),
        (
            {"a": Part(reward=says(1), needs={"a": 1})},
            "reward.parts.a.needs",
            "no other part 'a'; expected none: it is",
        ),
        (
            {"a": Part(reward=says(1), needs={"b": 1}), "b": Part(reward=says(1), needs={"a": 1})},
            "reward.parts",
            "none of them can be computed first",
        ),
    ]:
        with subtests.test(parts=parts):
            with pytest.raises(SpecError) as caught:
                Combined(parts)
            assert caught.value.problems[0].path == path
            assert said in caught.value.problems[0].message


def test_a_gate_that_is_not_there_is_told_the_nearest_one():
    with pytest.raises(SpecError, match="Did you mean 'task'"):
        combined(task=says(1), style=Part(reward=says(1), needs={"tsk": 1}))


def test_a_product_with_weights_is_refused():
    with pytest.raises(SpecError, match="a product has no weights"):
        combined("product", a=Part(reward=says(1), weight=2.0))
