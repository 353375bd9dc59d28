"""Normalised rewards: the formula, and running statistics independent of the order of judging."""

from __future__ import annotations

import asyncio
import random
from statistics import fmean, pstdev

import pytest

from components.errors import SpecError
from components.rewards import judge as judging
from components.rewards.composition.combined import Combined, Part
from components.rewards.composition.normalised import Normalised
from components.rewards.judges.learned import Learned
from components.rewards.judges.ruler import Ruler
from components.rewards.llm.models.served import ServedJudge
from components.rewards.rules.labelled import Labelled
from components.rewards.rules.outcome import Outcome
from components.trajectories.schema import Score
from components.trajectories.store import read_scores, write_scores
from tests.trajectories.builders import FAILURE, episode


def judge(reward, trajectories, **options):
    return list(judging.judge(reward, trajectories, **options))


VALUES = {f"s{group}/{sample}": 10.0 * group + sample**2 for group in range(6) for sample in range(3)}
ROWS = [episode(f"s{group}", sample) for group in range(6) for sample in range(3)]


def given(trajectory):
    return VALUES[trajectory.id]


def test_over_a_group_it_is_the_formula():
    scores = judge(Normalised(given), ROWS)
    for score in scores:
        group = [value for name, value in VALUES.items() if name.split("/")[0] == score.trajectory_id.split("/")[0]]
        expected = (VALUES[score.trajectory_id] - fmean(group)) / (pstdev(group) + 1e-6)
        assert score.reward == pytest.approx(expected, rel=1e-12)
        assert score.components == {"reward": VALUES[score.trajectory_id]}


def test_running_it_is_the_formula_over_all_groups_so_far():
    for score in judge(Normalised(given, "running"), ROWS):
        group = int(score.trajectory_id[1])
        recorded = [value for name, value in VALUES.items() if int(name[1]) <= group]
        expected = (VALUES[score.trajectory_id] - fmean(recorded)) / (pstdev(recorded) + 1e-6)
        assert score.reward == pytest.approx(expected, rel=1e-12)
        assert score.components == {"reward": VALUES[score.trajectory_id]}


def test_centring_and_scaling_can_be_had_alone():
    rows = ROWS[3:6]
    values = [10.0, 11.0, 14.0]
    assert [score.reward for score in judge(Normalised(given, scale=False), rows)] == pytest.approx(
        [value - fmean(values) for value in values]
    )
    assert [score.reward for score in judge(Normalised(given, centre=False), rows)] == pytest.approx(
        [value / (pstdev(values) + 1e-6) for value in values]
    )
    with pytest.raises(SpecError, match=r"reward\.centre"):
        Normalised(given, centre=False, scale=False)


def test_equal_rewards_are_zero_and_no_explosion():
    assert [score.reward for score in judge(Normalised(lambda score: 1e15 / 3), ROWS[:3])] == [0.0, 0.0, 0.0]


def test_step_rewards_still_add_up():
    def steps(trajectory):
        return Score(trajectory.id, VALUES[trajectory.id], step_rewards=[1.0, VALUES[trajectory.id] - 1.0])

    for how in ("group", "running"):
        for score in judge(Normalised(steps, how), ROWS):
            assert len(score.step_rewards) == 2
            assert sum(score.step_rewards) == pytest.approx(score.reward, abs=1e-9)


def test_unscored_episodes_are_in_no_statistics():
    rows = [*ROWS[:3], episode("s0", 3, failure=FAILURE), episode("s0", 4)]

    def reward(trajectory):
        return VALUES[trajectory.id] if trajectory.id in VALUES else float("nan")

    for how in ("group", "running"):
        scores = judge(Normalised(reward, how), rows)
        assert [score.reward for score in scores[:3]] == [
            score.reward for score in judge(Normalised(given, how), ROWS[:3])
        ]
        assert scores[3] == Score("s0/3", None, failure=FAILURE)
        assert scores[4].failure.message == "reward: the reward is nan, expected a finite number"


class Waits:
    """Reward with a different duration for each episode, so that groups finish in another order than they start."""

    def __init__(self, broken=()):
        self.asked = []
        self.broken = set(broken)

    async def score_group(self, group):
        self.asked += [trajectory.id for trajectory in group]
        await asyncio.sleep(random.Random(group[0].group).random() * 0.03)
        if group[0].group in self.broken:
            raise TimeoutError("no answer")
        said = {"said": 1.0}
        return [
            Score(trajectory.id, given(trajectory), said, [1.0, 2.0], f"because {trajectory.id}", 0.125)
            for trajectory in group
        ]


def tree(inner):
    """Nested running statistics: below a sum, below a second normalisation."""
    below = Combined({"judge": Part(reward=Normalised(inner, "running"), weight=2.0), "task": Part(reward=Outcome())})
    return Combined({"all": Part(reward=Normalised(below, "running")), "flat": Part(reward=lambda trajectory: 0.5)})


def test_whatever_the_concurrency_the_scores_are_the_same():
    plain = judge(
        tree(
            lambda trajectory: Score(
                trajectory.id, given(trajectory), {"said": 1.0}, [1.0, 2.0], f"because {trajectory.id}", 0.125
            )
        ),
        ROWS,
    )
    for concurrency in (1, 2, 16):
        assert judge(tree(Waits()), ROWS, concurrency=concurrency) == plain
    assert plain[7].components.keys() == {
        *("all", "flat", "all/reward", "all/reward/judge", "all/reward/task", "all/reward/task/success"),
        *("all/reward/judge/reward", "all/reward/judge/reward/said"),
    }
    assert plain[7].explanation == "all: reward: judge: reward: because s2/1"
    assert plain[7].cost == 0.125
    judged = [(VALUES[f"s{group}/{sample}"], group) for group in range(6) for sample in range(3)]
    recorded = [value for value, group in judged if group <= 2]
    expected = (VALUES["s2/1"] - fmean(recorded)) / (pstdev(recorded) + 1e-6)
    assert plain[7].components["all/reward/judge"] == pytest.approx(expected, rel=1e-12)


def test_a_stage_that_was_killed_and_goes_on_finds_the_same_scores(tmp_path, subtests):
    judged = []
    whole = judge(tree(Waits()), ROWS, concurrency=4, on_judged=judged.extend)
    for kept_groups in [[0], [3], [0, 2, 5], [1, 2, 3, 4, 5]]:
        with subtests.test(kept_groups=kept_groups):
            stored = [score for score in judged if int(score.trajectory_id[1]) in kept_groups]
            write_scores(tmp_path / "kept.parquet", stored)  # as the stage does
            finished = {score.trajectory_id: score for score in read_scores(tmp_path / "kept.parquet")}
            again = Waits()
            assert judge(tree(again), ROWS, concurrency=3, finished=finished) == whole
            assert {name.split("/")[0] for name in again.asked} == {
                f"s{group}" for group in range(6) if group not in kept_groups
            }


def test_what_was_unscored_is_in_no_statistics_and_what_others_cost_stays():
    scores = judge(tree(Waits(broken=["s1"])), ROWS, concurrency=4)
    rest = [row for row in ROWS if row.group != "s1"]
    assert [score for score in scores if score.trajectory_id[1] != "1"] == judge(tree(Waits()), rest)
    assert scores[3].failure.message.startswith("all: reward: judge: reward: no answer (tests/rewards/")
    assert scores[3].components["flat"] == 0.5


def test_statistics_begin_anew_with_each_judging():
    reward = tree(Waits())
    assert judge(reward, ROWS) == judge(reward, ROWS)


def test_a_part_that_needs_a_normalised_one_is_asked_about_all():
    parts = {
        "score": Part(reward=Normalised(given, "running")),
        "bonus": Part(reward=lambda trajectory: 10.0, needs={"score": 0.0}),
    }
    with pytest.raises(SpecError, match=r"reward\.ask: passed: score keeps running statistics"):
        Combined(parts)
    alone = judge(Normalised(given, "running"), ROWS)
    scores = judge(Combined(parts, ask="all"), ROWS)
    assert [score.reward for score in scores] == [
        plain.reward + (10.0 if plain.reward >= 0 else 0.0) for plain in alone
    ]


def test_a_reward_that_asks_another_by_itself_takes_none_with_running_statistics(tmp_path):
    with pytest.raises(SpecError, match=r"reward\.task: keeps running statistics"):
        Learned("folder", task=Normalised(given, "running"))
    (tmp_path / "labels.jsonl").write_text('{"trajectory_id": "a/0", "step": 0, "label": 1}\n')
    with pytest.raises(SpecError, match=r"reward\.task: keeps running statistics"):
        Labelled(str(tmp_path / "labels.jsonl"), task=Normalised(given, "running"))
    with pytest.raises(SpecError, match=r"reward\.independent: keeps running statistics"):
        Ruler(ServedJudge(url="http://127.0.0.1:9/v1", model="m"), independent=Normalised(given, "running"))
