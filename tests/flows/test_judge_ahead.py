"""Judging while episodes are collected: what is judged when, what the judge stage takes over, and what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from components.errors import JudgeError, SpecError
from components.specs import validate
from components.trajectories.schema import History, Message, Scenario, Score, Trajectory
from components.trajectories.store import read_scores
from flows.experiment.requests import Requests
from flows.stages.ahead import JudgeAhead
from flows.stages.ahead_scores import FILES
from flows.stages.base import Context
from flows.stages.execute import find_stage, run_stage
from flows.stages.judge import JudgeStage
from tests.flows.pretend import spec_of
from tests.flows.test_online_rl import Recorder
from tests.flows.waiting import until

LOG: list[tuple[float, str]] = []
"""When each episode was judged: of this process alone."""


class Asked:
    """A judge behind a service: it takes a moment, and says how long the answer is."""

    async def __call__(self, trajectory):
        await asyncio.sleep(0.02)
        LOG.append((time.monotonic(), trajectory.id))
        return float(len(trajectory.histories[0].messages[-1].content))


class AskedByGroup:
    """A judge that compares the episodes of a scenario."""

    async def score_group(self, group):
        await asyncio.sleep(0.02)
        LOG.append((time.monotonic(), ",".join(trajectory.id for trajectory in group)))
        lengths = [len(trajectory.histories[0].messages[-1].content) for trajectory in group]
        mean = sum(lengths) / len(lengths)
        return [Score(trajectory.id, length - mean) for trajectory, length in zip(group, lengths, strict=True)]


class Broken:
    """A judge whose service has gone."""

    async def __call__(self, trajectory):
        raise JudgeError("nobody answers")


def reward(kind):
    return {"_target_": f"tests.flows.test_judge_ahead.{kind.__name__}"}


SMALL = {
    "allow": ["tests"],
    "rounds": 1,
    "warmup": None,
    "deploy": {"mode": "none"},
    "filter": {"_target_": "components.filters.everything.Everything"},
    "collect": {"scenarios": 2, "group_size": 2, "concurrency": 1},
    "agent": {"max_turns": 2, "max_tokens": 8},
    "algorithm": {"name": "grpo", "baseline": "none", "scale": "none"},
}


def requests_of(root, kind, ahead):
    return Requests(spec_of(root, **SMALL, reward=reward(kind), judge={"ahead": ahead}))


@pytest.mark.parametrize("kind", [Asked, AskedByGroup])
def test_scores_are_those_of_judging_after_the_collection(tmp_path, kind):
    """Both trajectories and scores have the same bytes and keys; nothing is judged twice."""
    found = []
    for ahead in (False, True):
        context = Context.at(tmp_path / str(ahead))
        requests = requests_of(tmp_path / str(ahead), kind, ahead)
        LOG.clear()
        collected = run_stage(requests.collect(None, 1), context)[0]
        at_collection = len(LOG)
        judged = run_stage(requests.judge(collected), context)[0]
        context.warm.close()
        units = 4 if kind is Asked else 2
        assert (at_collection, len(LOG)) == ((units, units) if ahead else (0, units))
        assert all((collected.path / name).is_file() == ahead for name in FILES)
        assert collected.metrics.get("judged_ahead") == (4.0 if ahead else None)
        found.append([(artifact.key, artifact.digest) for artifact in (collected, judged)])
        found[-1].append((judged.path / "scores.parquet").read_bytes())
    assert found[0] == found[1]


def episode(number, sample, text="hello"):
    scenario = Scenario(f"s{number}", {}, "train")
    history = History([Message("user", "hi"), Message("assistant", text)])
    return Trajectory(f"s{number}/{sample}", scenario, sample, [history])


def judge_ahead(tmp_path, kind, group_size=2):
    context = replace(Context.at(tmp_path), scratch=tmp_path / "scratch")
    (tmp_path / "scratch").mkdir(exist_ok=True)

    spec = validate(JudgeStage, {"reward": reward(kind)}, allow=("tests",))
    return JudgeAhead(spec, context, group_size)


def test_an_episode_is_judged_while_others_are_played(tmp_path):
    LOG.clear()
    ahead = judge_ahead(tmp_path, Asked)
    ahead.add(episode(1, 0))
    until(lambda: LOG)  # judged before the collection has ended
    ahead.add(episode(2, 1, "hello there"))
    ahead.finish()
    assert {name: score.reward for name, score in ahead.scores.items()} == {"s1/0": 5.0, "s2/1": 11.0}


def test_a_group_waits_for_its_last_episode_and_is_judged_in_the_order_of_its_samples(tmp_path):
    LOG.clear()
    ahead = judge_ahead(tmp_path, AskedByGroup)
    for number, sample in ((1, 1), (2, 0), (1, 0), (2, 1), (3, 0)):
        ahead.add(episode(number, sample, "hello" * (sample + 1)))
    until(lambda: LOG)
    ahead.finish()
    assert sorted(group for _, group in LOG) == ["s1/0,s1/1", "s2/0,s2/1"]
    assert ahead.scores["s1/1"].reward == 2.5


def test_judgements_of_an_interrupted_collection_are_kept(tmp_path):
    LOG.clear()
    ahead = judge_ahead(tmp_path, Asked)
    ahead.add(episode(1, 0))
    until(lambda: ahead.scores)
    ahead.stop()
    again = judge_ahead(tmp_path, Asked)
    again.add(episode(1, 0))
    again.add(episode(1, 1))
    again.finish()
    assert [name for _, name in LOG] == ["s1/0", "s1/1"]
    assert set(again.scores) == {"s1/0", "s1/1"}


def test_a_judge_that_fails_leaves_the_rest_to_the_judge_stage(tmp_path):
    ahead = judge_ahead(tmp_path, Broken)
    ahead.add(episode(1, 0))
    ahead.finish()
    assert ahead.scores == {}


def test_scores_of_another_reward_are_not_taken_over(tmp_path):
    context = Context.at(tmp_path)
    LOG.clear()
    collected = run_stage(requests_of(tmp_path, Asked, True).collect(None, 1), context)[0]
    digest = json.loads((collected.path / "ahead.json").read_text())["reward"]
    other = requests_of(tmp_path, AskedByGroup, True)
    assert find_stage(other.collect(None, 1), context) is not None  # no part of the key
    LOG.clear()
    judged = run_stage(other.judge(collected), context)[0]
    context.warm.close()
    assert len(LOG) == 2
    assert len(digest) == 64
    assert {score.reward for score in read_scores(judged.path / "scores.parquet")} != {5.0}


def test_what_cannot_be_judged_ahead_is_refused_and_no_key_depends_on_it(tmp_path):
    for change, words in (
        ({"reward": {"_target_": "components.rewards.rules.outcome.Outcome"}}, "waits for no service"),
        ({"collect": {**SMALL["collect"], "reflection": {}}}, "collect.reflection adds episodes"),
    ):
        options = {**SMALL, "reward": reward(Asked), "judge": {"ahead": True}, **change}
        with pytest.raises(SpecError, match=rf"judge.ahead: true: .*{words}.*expected false"):
            spec_of(tmp_path, **options)
        spec_of(tmp_path, **{**options, "judge": {"ahead": False}})
    options = {"allow": ["tests"], "reward": reward(Asked)}
    runs = [Recorder(tmp_path, **options, judge={"ahead": ahead}) for ahead in (False, True)]
    assert runs[0].keys == runs[1].keys
