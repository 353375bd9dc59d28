"""Episodes for programs of others: sources, actions, rewards, ends, sessions, and the command."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import replace

import pytest

from components.environments.protocol import Step
from components.environments.tools import InvalidAction, TextEnvironment
from components.errors import EnvironmentFailed, SpecError, WaitTimeout
from components.trajectories.schema import Scenario
from flows.environment import serving as command
from flows.interop import actions
from flows.interop.actions import InvalidRequest
from flows.interop.episode import EpisodeThread
from flows.interop.sessions import CapacityReached, SessionLimits, Sessions
from flows.interop.source import EpisodeSource, load
from tests.conformance.reference_episodes import WRONG, reference


class Clock(TextEnvironment):
    """Ends at "stop"; "fail" raises, "sleep" takes long."""

    def scenarios(self, split):
        return [Scenario(f"{split}-{n}", {"n": n}, split) for n in range(3)]

    def begin(self, scenario):
        self.ticks = 0
        return f"clock {scenario.input['n']}"

    def act(self, action):
        if action == "fail":
            raise RuntimeError("broken spring")
        if action == "sleep":
            time.sleep(30)
        if action == "bad":
            raise InvalidAction("no such action")
        self.ticks += 1
        self.reward += 0.25
        self.done = action == "stop"
        return f"tick {self.ticks}"

    def outcome(self, answer):
        return {"success": self.ticks == 2}


def success(trajectory) -> float:
    return float(trajectory.success)


def source(*, max_turns: int = 5, step_timeout: float | None = None, reward=lambda: success) -> EpisodeSource:
    scenarios = tuple(Clock().scenarios("train"))
    return EpisodeSource("clock", "A clock.", Clock, reward, "train", scenarios, (), max_turns, step_timeout)


@pytest.fixture
def episode():
    """A function that makes an episode thread; all are closed at the end."""
    threads = []

    def make(**options) -> EpisodeThread:
        threads.append(EpisodeThread(source(**options)))
        return threads[-1]

    yield make
    for thread in threads:
        thread.close()


def reset(thread: EpisodeThread, seed: int = 0):
    scenario = thread.episode.source.scenario(seed=seed)
    return thread.call(lambda one: one.reset(scenario))


def step(thread: EpisodeThread, text: str):
    return thread.call(lambda one: one.step(actions.message(text)))


def test_rewards_of_an_episode_sum_to_its_score(episode):
    thread = episode()
    assert reset(thread, 1).text == "clock 1"
    first, last = step(thread, "tick"), step(thread, "stop")
    assert (first.reward, first.done, first.text) == (0.0, False, "tick 1")
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    assert thread.call(lambda one: one.score()) == 1.0


def test_rewards_of_steps_pass_through_for_a_reward_of_steps(episode):
    from components.rewards.rules.returned import Returned

    thread = episode(reward=Returned)
    reset(thread)
    assert [step(thread, text).reward for text in ("tick", "bad", "stop")] == pytest.approx([0.25, 0.0, 0.25])


def test_an_instance_is_replaced_after_its_episodes_and_limits_sessions():
    class Fragile(Clock):
        good_for = 2
        made = 0

        def __init__(self):
            Fragile.made += 1

    thread = EpisodeThread(replace(source(), make=Fragile))
    for seed in range(5):
        reset(thread, seed)
    assert Fragile.made == 3
    thread.close()
    assert Sessions(replace(source(), instances=1), SessionLimits(sessions=4)).most == 1


def test_an_environment_that_cannot_be_built_is_an_environment_failure():
    def make():
        raise RuntimeError("no licence")

    with pytest.raises(EnvironmentFailed, match="no licence"):
        EpisodeThread(replace(source(), make=make))


def test_an_episode_is_truncated_after_max_turns_and_scored(episode):
    thread = episode(max_turns=2)
    reset(thread)
    step(thread, "tick")
    last = step(thread, "tick")
    assert (last.terminated, last.truncated, last.reward) == (False, True, 1.0)
    with pytest.raises(InvalidRequest, match="after the end"):
        step(thread, "tick")
    assert reset(thread).text == "clock 0"


def test_a_step_before_the_reset_and_after_a_failed_step_is_refused(episode):
    thread = episode()
    with pytest.raises(InvalidRequest, match="step before reset"):
        step(thread, "tick")
    reset(thread)
    with pytest.raises(EnvironmentFailed, match="broken spring"):
        step(thread, "fail")
    with pytest.raises(InvalidRequest, match="step before reset"):
        step(thread, "tick")


def test_a_step_that_takes_too_long_ends_with_its_limit():
    thread = EpisodeThread(source(step_timeout=0.2))
    reset(thread)
    with pytest.raises(WaitTimeout, match=r"longer than 0\.2 s \(collect\.step_timeout\)"):
        step(thread, "sleep")


def test_scenarios_are_chosen_by_seed_and_by_id():
    shop = source()
    assert [shop.scenario(seed=seed).id for seed in (None, 0, 2, 3)] == ["train-0", "train-0", "train-2", "train-0"]
    assert shop.scenario(id="train-1").input == {"n": 1}
    with pytest.raises(InvalidRequest, match=r"train-8.*Did you mean 'train-"):
        shop.scenario(id="train-8")


def test_a_configuration_that_cannot_be_served_is_refused():
    judged = ["environment=shop", "reward=rubric", "reward.model={url: http://127.0.0.1:1/v1, model: m}"]
    with pytest.raises(SpecError, match=r"environment.*shop"):
        load(["environment=shopp"])
    with pytest.raises(SpecError, match="asks a model"):
        load(judged)
    with pytest.raises(SpecError, match="'validation': shop has no scenarios"):
        load(["environment=shop"], "validation")


def test_text_is_a_message_or_tool_calls():
    def read(text: str, has_tools: bool = True):
        action = actions.from_text(text, has_tools)
        functions = [call["function"] for call in action.get("tool_calls", [])]
        return [(function["name"], json.loads(function["arguments"])) for function in functions], action["content"]

    assert read('{"name": "go"}', has_tools=False) == ([], '{"name": "go"}')
    expected = {
        "left": ([], "left"),
        '{"name": "go", "arguments": {"to": 1}}': ([("go", {"to": 1})], ""),
        '[{"name": "a"}, {"name": "b", "arguments": {}}]': ([("a", {}), ("b", {})], ""),
        '{"answer": 3}': ([], '{"answer": 3}'),
        '{"name": "go", "argu': ([], '{"name": "go", "argu'),
        '{"role": "assistant", "content": "so"}': ([], "so"),
    }
    assert {text: read(text) for text in expected} == expected
    for message in ({"content": 3}, {"tool_calls": 3}, {"tool_calls": [{"function": {}}]}):
        with pytest.raises(InvalidRequest, match=next(iter(message))):
            actions.from_message(message)


def test_sessions_are_separate_limited_and_closed_when_idle():
    async def use() -> None:
        sessions = Sessions(source(), SessionLimits(sessions=2, idle=0.2))
        async with sessions.running():
            first, second = await sessions.open(attached=True), await sessions.open(attached=True)
            with pytest.raises(CapacityReached, match="2 sessions are open"):
                await sessions.open()
            await asyncio.gather(first.reset(seed=1), second.reset(seed=2))
            texts = [(await one.call(lambda e: e.step(actions.message("tick")))).text for one in (first, second, first)]
            assert texts == ["tick 1", "tick 1", "tick 2"]
            second.attached = False
            while len(sessions) > 1:  # until the check for idle sessions
                await asyncio.sleep(0.05)
            assert sessions.get(first.id) is first
            assert sessions.get(second.id) is None
        assert len(sessions) == 0

    asyncio.run(use())


def test_the_reference_differs_where_an_episode_differs():
    solved, wrong = reference("shop", (0,))
    assert (solved.reward, wrong.reward, wrong.actions) == (1.0, 0.0, (WRONG,))


def test_a_port_in_use_and_an_unknown_environment_are_user_errors(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = command.main(["environment=guess", "--as", "openenv", "--port", str(port)])
    assert code == 2
    assert f"--port {port}: cannot listen on 127.0.0.1" in capsys.readouterr().err
    assert command.main(["environment=nowhere", "--as", "mcp"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_wrong_options_name_what_is_expected(capsys):
    for arguments, message in {
        "--as openenv --stdio": "--stdio requires --as mcp",
        "--as mcp --sessions 0": "--sessions 0: expected at least 1",
        "--as mcp --idle-timeout 0": "--idle-timeout 0: expected a positive number",
        "--as mcp --port 70000": "--port 70000: expected 0 to 65535",
        "--as soap": "invalid choice: 'soap'",
        "": "required: --as",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            command.main(["environment=guess", *arguments.split()])
        assert message in capsys.readouterr().err


def test_steps_of_the_environment_are_validated():
    class Broken(Clock):
        def step(self, action):
            return Step([{"role": "nobody", "content": "x"}])

    thread = EpisodeThread(replace(source(), make=Broken))
    reset(thread)
    with pytest.raises(EnvironmentFailed, match="nobody"):
        step(thread, "tick")
    thread.close()
