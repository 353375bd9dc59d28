"""Tests of planner and worker: their prompts, recorded tokens, and the end of an episode."""

from __future__ import annotations

import json

import pytest

from components.environments.tools import ToolEnvironment, call, tool
from components.inference.protocol import ChatCompletion
from components.rollout.collector import demonstrate
from components.rollout.formats import Presentation
from components.rollout.players.player import Player
from components.rollout.players.roles import PlannerAndWorkers
from components.rollout.spec import RolesSpec
from components.trajectories.schema import Scenario
from tests.rollout.worlds import Parrot, collect

ROLES = RolesSpec(planner="PLAN", worker="WORK", worker_turns=2)
JOBS = [Scenario("s0", {}, "train")]


class Safe(ToolEnvironment):
    """Turn twice, then say open."""

    system = "A safe."

    def scenarios(self, split):
        return JOBS

    def begin(self, scenario):
        self.turned = 0
        return "Open it."

    @tool
    def turn(self) -> str:
        """turns the wheel"""
        self.turned += 1
        self.reward = 0.25
        return f"turned {self.turned}"

    def outcome(self, answer):
        return {"success": self.turned == 2 and answer == "open"}

    def solve(self, scenario):
        return [call("turn", {}, 0), call("turn", {}, 1), {"role": "assistant", "content": "open"}]


class Actor(Parrot):
    """An engine with scripted responses per role; a list is a tool call."""

    def __init__(self, planner, worker):
        super().__init__()
        self.script = {"PLAN": list(planner), "WORK": list(worker)}

    async def chat(self, request):
        answer = await super().chat(request)
        said = self.script[request.messages[0]["content"][:4]].pop(0)
        message = answer.message
        message["content"] = "" if isinstance(said, list) else said
        if isinstance(said, list):
            function = {"name": said[0], "arguments": json.dumps({})}
            message["tool_calls"] = [{"id": f"c{len(self.requests)}", "type": "function", "function": function}]
        ids = [ord(letter) for letter in message["content"]] or [7]
        prompt = [ord(letter) for message in request.messages for letter in message["content"] or "\7"]
        return ChatCompletion(message, "stop", prompt, ids, [-0.5] * len(ids), answer.policy)


def played(engine, **options):
    player = Player(PlannerAndWorkers(Presentation(), ROLES))
    (trajectory,) = collect(engine, Safe, JOBS, player=player, group_size=1, **{"max_turns": 9, **options})
    return trajectory


def test_both_roles_are_recorded_and_share_the_end():
    engine = Actor(["Turn it twice.", "Answer: open"], [["turn"], ["turn"]])
    trajectory = played(engine)
    assert trajectory.success
    assert [history.agent for history in trajectory.histories] == ["planner", "worker"]
    planner, worker = ([(m.role, m.content) for m in history.messages] for history in trajectory.histories)
    assert planner == [
        ("system", "PLAN\n\nThe worker has these tools:\n- turn: turns the wheel\n\nA safe."),
        ("user", "Open it."),
        ("assistant", "Turn it twice."),
        ("user", "The worker sent no report. Its last observation: turned 2"),
        ("assistant", "Answer: open"),
    ]
    assert worker[:2] == [("system", "WORK\n\nA safe."), ("user", "Turn it twice.")]
    assert worker[-1] == ("tool", "turned 2")
    asked = {request.messages[0]["content"][:4]: request.tools for request in engine.requests}
    assert asked == {"PLAN": [], "WORK": trajectory.tools}
    assert sum(sum(history.sampled_mask()) for history in trajectory.histories) == trajectory.metrics["sampled_tokens"]
    assert trajectory.step_rewards == [0.0, 0.0, 0.25, 0.25]
    assert (trajectory.metrics["turns"], trajectory.metrics["subgoals"]) == (4, 1)
    assert len({request.seed for request in engine.requests}) == len(engine.requests)


def test_each_worker_begins_anew_and_says_what_came_of_it():
    engine = Actor(["Turn it.", "Again.", "Answer: open"], [["turn"], "Done.", ["turn"], "Done too."])
    trajectory = played(engine)
    assert trajectory.success
    assert [history.agent for history in trajectory.histories] == ["planner", "worker", "worker"]
    reports = [m.content for m in trajectory.histories[0].messages if m.role == "user"]
    assert reports == ["Open it.", "The worker says: Done.", "The worker says: Done too."]
    assert trajectory.histories[2].messages[1].content == "Again."
    assert len(trajectory.step_rewards) == trajectory.metrics["turns"] == 7


@pytest.mark.parametrize(("turns", "histories"), [(1, 1), (2, 2), (3, 2), (4, 2)])
def test_turns_are_of_both_together(turns, histories):
    trajectory = played(Actor(["Turn it.", "Answer: open"], [["turn"], "Done."]), max_turns=turns)
    assert trajectory.metrics["turns"] == turns
    assert len(trajectory.histories) == histories
    assert trajectory.failure is None
    assert not trajectory.success


def test_a_planner_that_says_nothing_is_told():
    trajectory = played(Actor(["", "Answer: open"], []))
    assert trajectory.metrics["parse_errors"] == 1
    assert trajectory.histories[0].messages[3].content == "error: state a sub-goal, or write Answer: and the answer"


@pytest.mark.parametrize("worker_turns", [1, 2, 4])
def test_a_demonstration_is_laid_out_as_the_episode_of_the_same_words(worker_turns):
    roles = ROLES.model_copy(update={"worker_turns": worker_turns})
    (shown,) = demonstrate(Safe, JOBS, Presentation(), roles)
    assert shown.success
    assert shown.policy == "solver"
    report = [["turn"], "turned 1", ["turn"], "turned 2"] if worker_turns > 1 else [["turn"], ["turn"]]
    engine = Actor(["turn: ", "turn: ", "Answer: open"], report)
    player = Player(PlannerAndWorkers(Presentation(), roles))
    (played_episode,) = collect(engine, Safe, JOBS, player=player, group_size=1, max_turns=9)
    texts = [
        [[(m.role, m.content, [c.name for c in m.tool_calls]) for m in history.messages] for history in t.histories]
        for t in (shown, played_episode)
    ]
    assert texts[0] == texts[1]
    assert [history.agent for history in shown.histories] == ["planner", "worker", "worker"]
    assert not any(history.token_ids for history in shown.histories)
    assert len(shown.step_rewards) == shown.metrics["turns"]
