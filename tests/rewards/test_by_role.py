"""Tests of rewards by role, and of the execution of sub-goals."""

from __future__ import annotations

import pytest

from components.errors import SpecError
from components.rewards.composition.by_role import ByRole
from components.rewards.rules.followed import Followed
from components.rewards.rules.outcome import Outcome
from components.trajectories.schema import History, Message, Scenario, ToolCall, Trajectory
from flows.experiment.compose import check


def worker(subgoal: str, *arguments: str, tool: str = "act") -> History:
    calls = [ToolCall(f"c{number}", tool, text) for number, text in enumerate(arguments)]
    return History(
        [Message("system", "Work."), Message("user", subgoal), Message("assistant", "", calls)], agent="worker"
    )


def episode(*workers: History, success: bool = True) -> Trajectory:
    planner = History([Message("user", "Win."), *(Message("assistant", "Go.") for _ in workers)], agent="planner")
    act = {"name": "act", "parameters": {"type": "object", "properties": {"action": {"type": "string"}}}}
    tools = [{"type": "function", "function": function} for function in (act, {"name": "rest"})]
    return Trajectory("s/0", Scenario("s", {}, "train"), 0, [planner, *workers], tools, outcome={"success": success})


RIGHT, WRONG = worker("Play 5.", '{"action": "5"}'), worker("Play 5.", '{"action": "6"}')


def test_each_role_has_its_reward_at_its_last_turn():
    reward = ByRole({"planner": Outcome(), "worker": Followed()})
    score, lost = reward.score_group([episode(RIGHT, WRONG), episode(RIGHT, success=False)])
    assert score.reward == 1.5
    assert (score.components["planner"], score.components["worker"]) == (1.0, 0.5)
    assert score.step_rewards == [0.0, 1.0, 0.0, 0.5]
    assert lost.step_rewards == [0.0, 1.0]


def test_a_reward_sees_the_histories_of_its_role():
    seen = {}

    def reward(name):
        return lambda trajectory: float(
            seen.setdefault(name, {history.agent for history in trajectory.histories}) == {name}
        )

    (score,) = ByRole({name: reward(name) for name in ("planner", "worker")}).score_group([episode(RIGHT)])
    assert seen == {"planner": {"planner"}, "worker": {"worker"}}
    assert score.step_rewards == [1.0, 1.0]


def test_a_role_without_a_turn_has_no_reward_and_a_role_without_a_reward_is_an_error():
    (alone,) = ByRole({"planner": Outcome(), "worker": Followed()}).score_group([episode()])
    assert alone.reward is None  # nobody took a turn
    (unrewarded,) = ByRole({"planner": Outcome()}).score_group([episode(RIGHT)])
    assert unrewarded.failure is not None
    assert "the role 'worker' has no reward" in unrewarded.failure.message
    with pytest.raises(SpecError, match=r"reward\.roles: is empty"):
        ByRole({})


def test_a_worker_followed_if_its_arguments_stand_in_the_subgoal(subtests):
    for history, expected in [
        (RIGHT, 1.0),
        (WRONG, 0.0),
        (worker("Play 15.", '{"action": "5"}'), 0.0),
        (worker("Play 5."), 0.0),
        (worker("Play 5.", "5"), 0.0),
        (worker("Play 5.", '{"action": " "}'), 0.0),
        (worker("order K1, item lamp", '{"order": "K1", "item": "lamp"}'), 1.0),
        (worker("Play 5.", "{}"), 0.0),
        (worker("Play 5.", '{"action": "5"}', tool="invented"), 0.0),
        (worker("Then rest.", "{}", tool="rest"), 1.0),
        (worker("Play 5.", "{}", tool="rest"), 0.0),
        (worker("wait 3", '{"minutes": 3}', '{"minutes": 4}'), 0.0),
    ]:
        with subtests.test(history=history):
            assert Followed()(episode(history)).reward == expected


WORKER_ONLY = "~reward.roles.planner"
THIRD = "+reward.roles.critic={_target_: components.rewards.rules.outcome.Outcome}"


def test_roles_of_the_reward_that_the_agent_lacks_are_refused(subtests):
    for lines, message in [
        ([], r"reward\.roles: planner, worker: agent\.roles=null has main, .*expected agent=planner_worker"),
        (["agent=planner_worker", WORKER_ONLY], r"reward\.roles: worker: agent\.roles has planner, worker, "),
        (["agent=planner_worker", THIRD], r"reward\.roles: planner, worker, critic: agent\.roles has planner, worker"),
    ]:
        with subtests.test(message=message), pytest.raises(SpecError, match=message):
            check(["reward=by_role", *lines])


def test_roles_of_the_agent_and_of_ones_own_agent_are_accepted():
    assert check(["reward=by_role", "agent=planner_worker"])
    own = "agent.function={_target_: tests.rollout.test_own_agent.plain}"
    assert check(["reward=by_role", own, "allow=[tests]"])
