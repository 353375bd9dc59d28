"""Errors of a reward affect only the trajectories it was called with, and never score zero."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from aiohttp import web

from components import aio
from components.errors import ArtifactError, EngineError, ResourceError, SpecError
from components.rewards import judge as judging
from components.trajectories.schema import Failure, Score
from components.trajectories.store import read_scores, write_scores
from tests.docs.pages import ROOT, blocks
from tests.rewards.judge_server import served
from tests.trajectories.builders import FAILURE, episode


def judge(reward, trajectories, **options):
    return list(judging.judge(reward, trajectories, **options))


def two_groups():
    return [episode("a", 0, success=True), episode("a", 1, success=False), episode("b", 0, success=False)]


class Group:
    """Group reward with the answer of a test."""

    def __init__(self, answer):
        self.answer = answer
        self.seen: list[list[str]] = []

    def score_group(self, group):
        self.seen.append([trajectory.id for trajectory in group])
        return self.answer(group)


def ranked(group):
    return [Score(row.id, i / 10, {"rank": float(i)}, [0.5], f"place {i}", 0.01) for i, row in enumerate(group)]


def test_a_function_is_a_reward():
    scores = judge(lambda trajectory: trajectory.success, two_groups())
    assert scores == [Score("a/0", 1.0), Score("a/1", 0.0), Score("b/0", 0.0)]
    assert all(type(score.reward) is float for score in scores)


def test_a_partial_function_is_a_reward():
    def scaled(trajectory, factor):
        return factor * trajectory.success

    assert [score.reward for score in judge(partial(scaled, factor=3), two_groups())] == [3.0, 0.0, 0.0]


def test_a_group_reward_sees_each_scenario_once():
    reward = Group(ranked)
    scores = judge(reward, two_groups())
    assert reward.seen == [["a/0", "a/1"], ["b/0"]]
    assert [(score.trajectory_id, score.reward) for score in scores] == [("a/0", 0.0), ("a/1", 0.1), ("b/0", 0.0)]
    assert scores[1] == Score("a/1", 0.1, {"rank": 1.0}, [0.5], "place 1", 0.01)


def test_failed_episodes_are_unscored_with_their_failure_and_not_shown():
    rows = [episode("a", 0), episode("a", 1, failure=FAILURE), episode("b", 0, failure=FAILURE)]
    reward = Group(ranked)
    assert judge(reward, rows)[1:] == [Score("a/1", None, failure=FAILURE), Score("b/0", None, failure=FAILURE)]
    assert reward.seen == [["a/0"]]
    assert judge(lambda _: 1.0, rows)[1].reward is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "finite"),
        (math.inf, "finite"),
        (-math.inf, "finite"),
        (np.float32("nan"), "finite"),
        (None, "None (NoneType)"),
        ("1.0", "'1.0' (str)"),
        ([1.0], "[1.0] (list)"),
        (1j, "(complex)"),
        (Decimal(1), "(Decimal)"),
    ],
)
def test_what_is_no_finite_number_is_unscored(value, said):
    (score,) = judge(lambda _: value, [episode()])
    assert score.reward is None
    assert (score.failure.boundary, score.failure.kind) == ("judge", "JudgeError")
    assert said in score.failure.message
    (score,) = judge(Group(lambda group: [Score(group[0].id, value, {"part": 1.0})]), [episode()])
    assert score.reward is None
    assert score.failure is not None


@pytest.mark.parametrize(
    "value", [1, True, np.float32(0.5), np.int64(3), np.bool_(True), np.array(0.5), torch.tensor(0.5), Fraction(1, 4)]
)
def test_numbers_of_any_kind_become_floats(value, tmp_path):
    scores = judge(lambda _: value, [episode()])
    assert scores == [Score("s/0", float(value))]
    write_scores(tmp_path / "s.parquet", scores)
    assert list(read_scores(tmp_path / "s.parquet")) == scores


def test_a_number_too_large_for_a_float_is_unscored():
    (score,) = judge(lambda _: 10**400, [episode()])
    assert (score.reward, score.failure.kind) == (None, "OverflowError")


def test_a_component_that_is_no_number_is_unscored():
    (score,) = judge(Group(lambda group: [Score(group[0].id, 1.0, {"style": math.nan})]), [episode()])
    assert score.reward is None
    assert "component 'style'" in score.failure.message


def test_a_raising_reward_unscores_only_what_it_was_asked_about(caplog):
    def reward(trajectory):
        if trajectory.id == "a/1":
            raise KeyError("answer")
        return 1.0

    with caplog.at_level(logging.WARNING):
        scores = judge(reward, two_groups())
    assert [score.reward for score in scores] == [1.0, None, 1.0]
    assert scores[1].failure.message.startswith("'answer' (tests/rewards/test_judge.py:")
    assert "1 of 3 finished episodes could not be scored" in caplog.text


def test_a_raising_group_reward_unscores_its_group():
    def answer(group):
        if group[0].group == "a":
            raise EngineError("the judge model did not answer")
        return ranked(group)

    scores = judge(Group(answer), two_groups())
    assert [score.reward for score in scores] == [None, None, 0.0]
    assert scores[0].failure == Failure("judge", "EngineError", "the judge model did not answer")


def test_scores_that_do_not_match_their_group_unscore_it(subtests):
    for answer in [
        lambda group: ranked(group)[:-1],
        lambda group: ranked(group)[::-1],
        lambda group: [*ranked(group), Score("else", 1.0)],
        lambda group: [1.0 for _ in group],
        lambda group: None,
    ]:
        with subtests.test(answer=answer):
            rows = [episode("a", 0), episode("a", 1)]
            scores = judge(Group(answer), rows)
            assert [score.trajectory_id for score in scores] == ["a/0", "a/1"]
            assert {score.reward for score in scores} == {None}
            assert {score.failure.kind for score in scores} == {"JudgeError"}


def test_a_group_reward_may_leave_one_unscored_with_its_own_reason():
    reason = Failure("judge", "Timeout", "no answer in 60 s")
    answers = {"a/0": Score("a/0", None, failure=reason), "a/1": Score("a/1", None), "a/2": Score("a/2", 1.0)}
    scores = judge(Group(lambda group: [answers[row.id] for row in group]), [episode("a", i) for i in range(3)])
    assert scores[0] == answers["a/0"]
    assert scores[1].failure is not None
    assert scores[2] == answers["a/2"]


@pytest.mark.parametrize(
    "error", [ResourceError("set JUDGE_API_KEY"), SpecError([]), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_what_would_meet_every_trajectory_passes_through(error):
    def reward(_):
        raise error

    with pytest.raises(type(error)):
        judge(reward, [episode()])
    with pytest.raises(type(error)):
        judge(Group(reward), [episode()])


def test_what_is_no_reward_is_refused():
    with pytest.raises(SpecError, match="int is no reward"):
        judge(3, [episode()])


def test_no_trajectories_no_scores():
    assert judge(lambda _: 1.0, []) == []


def test_scores_stream_as_the_episodes_come():
    pulled = []

    def rows():
        for row in two_groups():
            pulled.append(row.id)
            yield row

    assert next(judging.judge(lambda _: 1.0, rows())).trajectory_id == "a/0"
    assert pulled == ["a/0"]
    pulled.clear()
    assert next(judging.judge(Group(ranked), rows())).trajectory_id == "a/0"
    assert pulled == ["a/0", "a/1", "b/0"]


def test_a_scenario_that_comes_back_is_refused_where_groups_are_judged():
    rows = [two_groups()[place] for place in (0, 2, 1)]
    with pytest.raises(ArtifactError, match="scenario a do not lie next to each other"):
        judge(Group(ranked), rows)
    assert [score.trajectory_id for score in judge(lambda _: 1.0, rows)] == ["a/0", "b/0", "a/1"]


class TestFinished:
    """Scores of an interrupted run."""

    def test_they_are_taken_as_they_are(self):
        asked, reported = [], []
        earlier = Score("a/0", 0.75, {"style": 1.0}, [0.5], "well said", 0.02)

        def reward(trajectory):
            asked.append(trajectory.id)
            return 1.0

        scores = judge(reward, two_groups(), finished={"a/0": earlier}, on_judged=reported.append)
        assert scores == [earlier, Score("a/1", 1.0), Score("b/0", 1.0)]
        assert asked == ["a/1", "b/0"]
        assert reported == [[scores[1]], [scores[2]]]

    def test_a_group_is_taken_whole_or_judged_again(self):
        whole = {"b/0": Score("b/0", 0.5), "a/1": Score("a/1", 0.5)}  # of group a, one is missing
        reward, reported = Group(ranked), []
        scores = judge(reward, two_groups(), finished=whole, on_judged=reported.append)
        assert reward.seen == [["a/0", "a/1"]]
        assert [score.reward for score in scores] == [0.0, 0.1, 0.5]
        assert reported == [scores[:2]]

    def test_a_failed_episode_is_not_missing_in_a_whole_group(self):
        rows = [episode("a", 0), episode("a", 1, failure=FAILURE)]
        reward = Group(ranked)
        assert judge(reward, rows, finished={"a/0": Score("a/0", 0.5)})[0].reward == 0.5
        assert reward.seen == []


# Rewards that wait


class Waiting:
    """Slow reward that counts concurrent calls."""

    def __init__(self, seconds=0.02):
        self.seconds = seconds
        self.now = self.most = self.asked = 0
        self.lock = threading.Lock()

    def begin(self):
        with self.lock:
            self.asked += 1
            self.now += 1
            self.most = max(self.most, self.now)

    def end(self):
        with self.lock:
            self.now -= 1


class Awaited(Waiting):
    async def __call__(self, trajectory):
        self.begin()
        try:
            await asyncio.sleep(self.seconds * (3 if trajectory.sample == 0 else 1))
        finally:
            self.end()
        return float(trajectory.sample)


class Blocking(Waiting):
    blocking = True

    def __call__(self, trajectory):
        self.begin()
        time.sleep(self.seconds * (3 if trajectory.sample == 0 else 1))
        self.end()
        return float(trajectory.sample)


class AwaitedGroup(Waiting):
    async def score_group(self, group):
        self.begin()
        await asyncio.sleep(self.seconds)
        self.end()
        return [Score(trajectory.id, float(trajectory.sample)) for trajectory in group]


def many(groups=10, size=4):
    return [episode(f"s{group}", sample) for group in range(groups) for sample in range(size)]


def test_of_a_reward_that_waits_so_many_are_under_way_and_scores_come_in_order(subtests):
    for make in [Awaited, Blocking, AwaitedGroup]:
        with subtests.test(make=make):
            reward = make()
            scores = judge(reward, many(), concurrency=5)
            assert [(score.trajectory_id, score.reward) for score in scores] == [
                (trajectory.id, float(trajectory.sample)) for trajectory in many()
            ]
            assert reward.most == 5
            one_by_one = make(0)
            assert judge(one_by_one, many(), concurrency=1) == scores
            assert one_by_one.most == 1


def test_few_groups_are_read_ahead_of_one_that_takes_long():
    read = []

    def trajectories():
        for trajectory in many(groups=200, size=1):
            read.append(trajectory.id)
            yield trajectory

    release = threading.Event()

    async def reward(trajectory):
        while trajectory.id == "s0/0" and not release.is_set():
            await asyncio.sleep(0.001)
        return 1.0

    scores = judging.judge(reward, trajectories(), concurrency=3)
    threading.Timer(0.3, lambda: (ahead.append(len(read)), release.set())).start()
    ahead: list[int] = []
    assert len(list(scores)) == 200
    assert ahead == [3 * aio.AHEAD]


def test_what_others_judged_meanwhile_is_kept_although_the_first_one_hangs():
    judged_ids = []
    others_done = threading.Event()

    async def reward(trajectory):
        if trajectory.id == "s0/0":
            while not others_done.is_set():
                await asyncio.sleep(0.001)
            raise SpecError([])
        return 1.0

    def keep(scores):
        judged_ids.extend(score.trajectory_id for score in scores)
        if len(judged_ids) == 7:
            others_done.set()

    with pytest.raises(SpecError):
        judge(reward, many(groups=8, size=1), concurrency=4, on_judged=keep)
    assert judged_ids == [f"s{number}/0" for number in range(1, 8)]


def test_what_a_reward_that_waits_does_wrong_stays_with_its_trajectory():
    async def reward(trajectory):
        errors = {0: KeyError("x"), 1: SystemExit(3), 2: asyncio.CancelledError(), 3: TimeoutError("slow")}
        await asyncio.sleep(0)
        if trajectory.scenario.id == "s1":
            raise errors[trajectory.sample]
        return 1.0

    scores = judge(reward, many(groups=3), concurrency=8)
    assert [score.reward for score in scores] == [1.0] * 4 + [None] * 4 + [1.0] * 4
    kinds = [score.failure.kind for score in scores if score.failure]
    assert kinds == ["KeyError", "SystemExit", "CancelledError", "TimeoutError"]


def test_who_stops_listening_stops_the_judge(subtests):
    for make in [Awaited, Blocking]:
        with subtests.test(make=make):
            reward = make(0.05)
            scores = judging.judge(reward, many(groups=100), concurrency=2)
            next(scores)
            scores.close()
            asked = reward.asked
            time.sleep(0.3)
            assert reward.asked == asked <= 2 * aio.AHEAD
            assert reward.now == 0


def test_finished_scores_are_not_asked_for_again_and_failed_episodes_never():
    reward = Awaited(0)
    rows = [*many(groups=2), episode("s9", 0, failure=FAILURE)]
    done = {"s1/2": Score("s1/2", 7.0)}
    scores = judge(reward, rows, concurrency=4, finished=done)
    assert reward.asked == 7
    assert scores[6] == done["s1/2"]
    assert scores[8] == Score("s9/0", None, failure=FAILURE)


def test_it_judges_where_a_loop_runs_already():
    async def notebook():
        return judge(Awaited(0), two_groups(), concurrency=2)

    assert [score.reward for score in asyncio.run(notebook())] == [0.0, 1.0, 0.0]


def test_the_judge_of_the_documentation_asks_a_server_many_times_at_once(monkeypatch):
    page = ROOT / "docs" / "guides" / "rollouts.md"
    (block,) = [block for block in blocks(page, "python") if "class Helpful" in block.text]
    defined: dict = {}
    exec(compile(block.text, str(block), "exec"), defined)
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    received = []

    async def answer(request):
        received.append((request.headers["Authorization"], await request.json()))
        while len(received) < 3:
            await asyncio.sleep(0.001)
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": " 0.75\n"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    with served(app) as url:
        scores = judge(defined["Helpful"](f"{url}/v1", "m"), two_groups(), concurrency=3)
    assert [score.reward for score in scores] == [0.75] * 3
    key, body = received[0]
    assert (key, body["model"]) == ("Bearer sesame", "m")
    assert body["messages"][-1]["content"].startswith("How helpful")
