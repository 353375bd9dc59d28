"""An environment begins a new context within an episode: the model reads nothing of the earlier one, each context is a
history of its own, and demonstrations have the same contexts as sampled episodes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from components.environments.processes import SubprocessEnvironment
from components.environments.tools import ToolEnvironment, call, tool
from components.environments.worlds.memory import Memory
from components.errors import SpecError
from components.inference.protocol import BASE_POLICY, ChatCompletion, Sampling
from components.inference.transformers.engine import TransformersEngine
from components.rollout.agent import AgentLoop
from components.rollout.collector import demonstrate
from components.rollout.formats import Presentation
from components.rollout.players.continuation import ContinuationPlayer
from components.rollout.players.player import Player
from components.rollout.players.roles import PlannerAndWorkers
from components.rollout.spec import RolesSpec
from components.sandbox import Limits
from components.specs import Target, validate
from components.trajectories.convert import to_openai
from components.trajectories.schema import Scenario
from tests.rollout.worlds import collect, play

FORMATS = ("native", "react")
SCENARIOS = [Memory(train=10).scenarios("train")[index] for index in (0, 4)]


class Rooms(ToolEnvironment):
    """Two rooms, each a context; `go` leads to the second."""

    system = "A house."

    def scenarios(self, split):
        return [ROOMS] if split == "train" else []

    def begin(self, scenario):
        return "Room 1."

    @tool
    def go(self) -> str:
        """leads to the next room"""
        return "You went."

    def step(self, action):
        step = super().step(action)
        if action.get("tool_calls"):
            messages = [{"role": "system", "content": self.system}, {"role": "user", "content": "Room 2."}]
            return replace(step, observation=messages, new_context=True)
        return step

    def outcome(self, answer):
        return {"success": answer == "two"}


ROOMS = Scenario("s0", {}, "train")


class Script:
    """An engine that gives these messages and keeps the requests."""

    policy = BASE_POLICY

    def __init__(self, *messages):
        self.messages, self.requests = list(messages), []

    async def chat(self, request):
        self.requests.append(request)
        return ChatCompletion(self.messages.pop(0), "stop", [], [], [], BASE_POLICY)


def episode(engine, environment, scenario, **options):
    return asyncio.run(play(engine, environment, scenario, **options))


def texts(history) -> list[str]:
    return [message.content for message in history.messages]


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.id)
def test_an_episode_of_the_solution_equals_the_demonstration(scenario, format_):
    presentation = Presentation(format_)
    (shown,) = demonstrate(Memory, [scenario], presentation)
    answers = [to_openai(m) for h in shown.histories for m in h.messages if m.role == "assistant"]
    script = Script(*answers)
    played = episode(script, Memory(), scenario, presentation=presentation, max_turns=20)
    assert played.success
    assert len(played.histories) == len(scenario.input["sessions"]) + 1
    assert [texts(history) for history in played.histories] == [texts(history) for history in shown.histories]
    assert played.tools == shown.tools
    assert len(played.step_rewards) == len(shown.step_rewards) == len(answers)
    # requests read the current context only, which begins with the same system message and tools
    starts = {json.dumps(request.messages[0]) for request in script.requests}
    assert len(starts) == 1
    last = " ".join(str(message) for message in script.requests[-1].messages)
    others = [fact for facts in scenario.input["facts"] for fact in facts if fact[1] != scenario.input["answer"]]
    assert not any(number in last for _, number in others)


def test_a_context_is_a_history_of_exact_tokens(base_dir):
    engine = TransformersEngine(base_dir, max_length=2048)
    trajectory = collect(engine, Memory, SCENARIOS, 2, max_turns=20, sampling=Sampling(max_tokens=6))[0]
    assert trajectory.failure is None
    assert len(trajectory.histories) >= 2  # random weights call no tools: each message ends a session
    for history, sentences in zip(trajectory.histories, SCENARIOS[0].input["sessions"], strict=False):
        assert [message.role for message in history.messages] == ["system", "user", "assistant"]
        assert all(sentence in history.messages[1].content for sentence in sentences)
        assert sum(history.sampled_mask()) > 0
        assert len(history.token_ids) == len(history.logprobs)
    engine.close()


def test_messages_that_nobody_answered_are_in_no_history():
    """The turns are used up as the second context begins."""
    trajectory = episode(Script(call("go", {})), Rooms(), ROOMS, max_turns=1)
    (history,) = trajectory.histories
    assert texts(history) == ["A house.", "Room 1.", ""]


def test_a_subprocess_passes_new_contexts_on():
    target = validate(Target, {"_target_": "components.environments.worlds.memory.Memory", "train": 10})
    environment = SubprocessEnvironment(target, processes=1)
    (inside,) = demonstrate(lambda: environment, SCENARIOS[:1], Presentation())
    (outside,) = demonstrate(Memory, SCENARIOS[:1], Presentation())
    assert inside == outside


def test_continuations_begin_in_the_context_of_their_step():
    player = ContinuationPlayer(AgentLoop(), count=1)
    scenario = SCENARIOS[0]
    (shown,) = demonstrate(Memory, [scenario], Presentation())
    answers = [to_openai(m) for h in shown.histories for m in h.messages if m.role == "assistant"]
    again = [answer for turn in reversed(range(len(answers) - 1)) for answer in answers[turn + 1 :]]
    (labelled,) = collect(Script(*answers, *again), Memory, [scenario], 1, max_turns=20, player=player)
    assert labelled.failure is None
    labels = [labelled.metrics[f"continued/{turn}"] for turn in range(len(answers))]
    assert labels == [1.0] * len(answers)


def test_agents_of_several_conversations_refuse_new_contexts():
    player = Player(PlannerAndWorkers(Presentation(), RolesSpec(planner="P", worker="W", worker_turns=2)))
    with pytest.raises(SpecError, match=r"begins a new context .* expected agent.roles=null"):
        collect(Script(said("Answer: done")), Memory, SCENARIOS[:1], 1, max_turns=6, player=player)


@pytest.mark.usefixtures("sandbox_here")
@pytest.mark.timeout(1800)
def test_code_loses_its_variables_with_the_context():
    code = "```python\nprint(1)\nx = 3\ngo()\n{}```"
    script = Script(said(code.format("")), said("```python\nprint(x)\n```"), said("two"))
    presentation = Presentation("code", limits=Limits(seconds=60, cpu_seconds=60))
    trajectory = episode(script, Rooms(), ROOMS, presentation=presentation, max_turns=3)
    assert trajectory.success
    first, second = trajectory.histories
    assert texts(first)[1:] == ["Room 1.", code.format("")]
    assert texts(second)[1] == "Room 2."
    assert "NameError" in texts(second)[3]
    refused = Script(said(code.format("go()\n")))
    trajectory = episode(refused, Rooms(), ROOMS, presentation=presentation, max_turns=1)
    assert trajectory.metrics["tool_calls"] == 1
