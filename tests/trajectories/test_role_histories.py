"""Tests of the roles of an episode."""

from __future__ import annotations

import pytest

from components.trajectories.roles import by_role, restrict, role_names, role_turns, tools_of
from components.trajectories.schema import History, Message, Scenario, Trajectory


def history(agent: str, turns: int, *, sampled: bool) -> History:
    messages = [Message("user", "go")]
    for turn in range(turns):
        messages.append(Message("assistant", "a", span=(turn, turn + 1) if sampled else None))
    return History(messages, [1] * turns if sampled else [], [-0.5] * turns if sampled else [], agent)


def episode(*, sampled: bool = True) -> Trajectory:
    histories = [
        history(agent, turns, sampled=sampled) for agent, turns in (("planner", 2), ("worker", 1), ("worker", 2))
    ]
    scenario = Scenario("s", {}, "train")
    return Trajectory(
        "s/0", scenario, 0, histories, tools=[{"type": "function"}], step_rewards=[1.0, 2.0, 3.0, 4.0, 5.0]
    )


@pytest.mark.parametrize("sampled", [True, False])
def test_turns_and_values_by_role(sampled):
    trajectory = episode(sampled=sampled)
    assert role_names(trajectory) == ["planner", "worker"]
    assert role_turns(trajectory) == ["planner"] * 2 + ["worker"] * 3
    assert by_role(trajectory, trajectory.step_rewards) == {"planner": [1.0, 2.0], "worker": [3.0, 4.0, 5.0]}


def test_a_restricted_trajectory_has_the_histories_and_step_rewards_of_its_roles():
    trajectory = episode()
    worker = restrict(trajectory, ["worker"])
    assert worker.histories == trajectory.histories[1:]
    assert worker.step_rewards == [3.0, 4.0, 5.0]
    trajectory.step_rewards = [1.0]
    assert restrict(trajectory, ["worker"]).step_rewards == []


def test_a_planner_reads_no_tools():
    trajectory = episode()
    assert [tools_of(trajectory, history) for history in trajectory.histories] == [[], *[trajectory.tools] * 2]
