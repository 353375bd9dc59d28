"""Tests of teacher episodes: scenarios, groups, and the recorded policy."""

from __future__ import annotations

from functools import partial

import pytest

from components.rollout.agent import AgentLoop
from components.rollout.players.teacher import CollectTeacherSpec, TeacherPlayer
from tests.rollout.test_reflection import Door
from tests.rollout.worlds import Parrot, collect, scenarios


class Knows(Parrot):
    policy = "large"

    async def chat(self, request):
        answer = await super().chat(request)
        answer.message["content"] = "sesame"
        return answer


def taught(student, teacher, **spec):
    player = TeacherPlayer(AgentLoop(), CollectTeacherSpec(temperature=0.25, **spec), teacher, 2)
    return partial(collect, student, Door, scenarios(2), player=player)


@pytest.mark.parametrize(
    ("spec", "ids"),
    [
        ({}, ["s0/0", "s0/1", "s1/0", "s1/1", "s1/2"]),
        ({"samples": 2}, ["s0/0", "s0/1", "s1/0", "s1/1", "s1/2", "s1/3"]),
        ({"only_failed": False}, ["s0/0", "s0/1", "s0/2", "s1/0", "s1/1", "s1/2"]),
    ],
)
def test_the_teacher_follows_where_it_is_asked_to(spec, ids):
    student, teacher = Parrot(), Knows()
    run = taught(student, teacher, **spec)
    trajectories = run()
    assert [trajectory.id for trajectory in trajectories] == ids
    shown = [trajectory for trajectory in trajectories if trajectory.sample > 1]
    assert {trajectory.policy for trajectory in shown} == {"teacher"}
    assert all(trajectory.success and trajectory.sampling["temperature"] == 0.25 for trajectory in shown)
    assert {trajectory.policy for trajectory in trajectories if trajectory not in shown} == {"base"}
    assert {request.policy for request in teacher.requests} == {"large"}
    for missing in trajectories:
        assert repr(
            run(finished={trajectory.id: trajectory for trajectory in trajectories if trajectory is not missing})
        ) == repr(trajectories)
