"""Tests of self-play: two conversations of one game, each with its own tokens and outcome."""

from __future__ import annotations

import pytest

from components.environments.games.tictactoe import TicTacToe, _opening
from components.errors import EngineError, SpecError
from components.inference.protocol import ChatCompletion
from components.rollout.agent import AgentLoop
from components.rollout.players.selfplay import SelfPlay
from tests.rollout.worlds import Echo, Parrot, collect, scenarios

GAME = TicTacToe(train=6, heldout=1)


def both() -> TicTacToe:
    return TicTacToe(train=6, heldout=1, opponent="agent")


class First(Parrot):
    """An engine that plays the first free cell: X wins with 1, 3, 5, 7."""

    async def chat(self, request):
        answer = await super().chat(request)
        free = "".join(request.messages[-1]["content"].splitlines()[-3:])
        move = next(cell for cell in "123456789" if cell in free)
        answer.message["content"] = move
        return ChatCompletion(answer.message, "stop", answer.prompt_token_ids, [ord(move)], [-0.5], answer.policy)


def test_a_game_is_an_episode_of_each_side():
    engine = First()
    jobs = GAME.scenarios("train")[:4]
    trajectories = collect(engine, both, jobs, player=SelfPlay(AgentLoop()), max_turns=5)
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    assert list(by_id) == [f"{job.id}{name}/{k}" for job in jobs for name in ("", "~other") for k in range(2)]
    for job in jobs:
        own, other = by_id[f"{job.id}/0"], by_id[f"{job.id}~other/0"]
        x, o = (own, other) if job.input["mark"] == "X" else (other, own)
        assert (x.histories[0].agent, o.histories[0].agent) == ("X", "O")
        texts = [[m.content for m in side.histories[0].messages if m.role == "assistant"] for side in (x, o)]
        assert texts == [["1", "3", "5", "7"], ["2", "4", "6"]]
        assert (x.success, o.success) == (True, False)
        assert (x.outcome["result"], o.outcome["result"]) == ("win", "loss")
        assert x.histories[0].messages[-1].content.endswith("You win.")
        shown = o.histories[0].messages
        assert shown[0].role == "system"
        assert shown[1].content == "You are O. Win.\nX 2 3\n4 5 6\n7 8 9"
        assert shown[3].content == "X plays 3.\nX O X\n4 5 6\n7 8 9"
        for side in (x, o):
            assert side.histories[0].sampled_mask().count(True) == side.metrics["turns"]
            assert len(side.step_rewards) == side.metrics["turns"]
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


def test_the_other_side_can_be_another_models():
    """Only the policy's side is an episode, and a group has one side only."""
    other = First()
    other.load_policy("old", None)
    engine = First()
    trajectories = collect(engine, both, GAME.scenarios("train"), player=SelfPlay(AgentLoop(), other), max_turns=5)
    assert [trajectory.id for trajectory in trajectories] == [
        f"{job.id}/{k}" for job in GAME.scenarios("train") for k in range(2)
    ]
    sides = {trajectory.group: trajectory.histories[0].agent for trajectory in trajectories}
    assert all(trajectory.histories[0].agent == sides[trajectory.group] for trajectory in trajectories)
    assert set(sides.values()) == {"X", "O"}
    assert {request.policy for request in other.requests} == {"old"}
    assert {request.policy for request in engine.requests} == {"base"}
    assert all(trajectory.success == (trajectory.histories[0].agent == "X") for trajectory in trajectories)


def test_a_failure_is_one_of_both_sides_and_both_are_played_again():
    jobs = GAME.scenarios("train")[:1]
    calls = []

    def fail(request):
        calls.append(request)
        if len(calls) == 4:
            raise EngineError("out of memory")

    broken = collect(First(fail=fail), both, jobs, player=SelfPlay(AgentLoop()), group_size=1)
    assert [trajectory.failure.message for trajectory in broken] == ["out of memory"] * 2
    whole = collect(First(), both, jobs, player=SelfPlay(AgentLoop()))
    for missing in whole:
        finished = {trajectory.id: trajectory for trajectory in whole if trajectory is not missing}
        assert repr(collect(First(), both, jobs, player=SelfPlay(AgentLoop()), finished=finished)) == repr(whole)


def test_a_game_ends_where_turns_are_used_up():
    x, o = collect(First(), both, GAME.scenarios("train")[:1], player=SelfPlay(AgentLoop()), group_size=1, max_turns=2)
    assert (x.metrics["turns"], o.metrics["turns"]) == (2, 2)
    assert x.outcome["result"] == o.outcome["result"] == "open"


@pytest.mark.parametrize("make", [Echo, lambda: GAME])
def test_what_is_no_game_for_two_is_refused(make):
    jobs = scenarios(1) if make is Echo else GAME.scenarios("train")[:1]
    with pytest.raises(SpecError, match=r"collect\.opponent: the environment .*expected two"):
        collect(Parrot(), make, jobs, player=SelfPlay(AgentLoop()))


def test_a_game_that_wants_both_sides_is_not_played_by_one():
    with pytest.raises(SpecError, match=r"wants [XO] and [XO] played; expected collect\.opponent"):
        collect(First(), both, GAME.scenarios("train")[:1])


def test_invalid_moves_are_counted_for_who_made_them():
    game = both()
    scenario = next(scenario for scenario in GAME.scenarios("train") if scenario.input["mark"] == "X")
    game.reset(scenario)
    call = {"type": "function", "function": {"name": "act", "arguments": '{"action": "1"}'}}
    twice = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", **call}, {"id": "b", **call}]}
    step = game.step(twice)
    assert [message["role"] for message in step.observation] == ["system", "user"]
    wrong = game.step({"role": "assistant", "content": "1"})
    assert wrong.observation == [{"role": "user", "content": "error: cell 1 is taken"}]
    assert {name: outcome["invalid_actions"] for name, outcome in wrong.info["players"].items()} == {"X": 1, "O": 1}
    state = game.save()
    messages = game.step({"role": "assistant", "content": "2"}).observation
    assert [(message["tool_call_id"], message["content"].splitlines()[0]) for message in messages] == [
        ("a", "O plays 2."),
        ("b", "error: one move a turn"),
    ]
    other = both()
    other.restore(scenario, state)
    assert other.step({"role": "assistant", "content": "2"}).observation == messages


def test_alone_it_is_the_game_it_was():
    for scenario in GAME.scenarios("train"):
        first = GAME.reset(scenario)
        assert first[-1]["content"].startswith(f"You are {scenario.input['mark']}.")
        assert GAME.board == _opening(scenario.input)
        assert GAME.turn == 0
