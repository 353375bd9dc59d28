"""AgentGym client against fake servers with the protocol and the errors of the real ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import TypeAdapter

from components import retry
from components.bounded_reply import LIMITS
from components.environments.adapters import agentgym_pool
from components.environments.adapters.agentgym import AgentGym
from components.environments.adapters.agentgym_actions import Action, parse_action
from components.environments.adapters.agentgym_kinds import KINDS
from components.environments.adapters.agentgym_pool import close_pools
from components.environments.tools import InvalidAction, acts
from components.errors import EnvironmentFailed, ResourceError, SpecError
from components.specs.target import Target
from tests.environments import checks
from tests.environments.agentgym_server import BY_INDEX, LATE, FakeAgentGym, Fault, solution, trajectories, words

ROOT = Path(__file__).parents[2]
FEW = {"train": 6, "heldout": 4}


@pytest.fixture(autouse=True)
def quick_without_pools(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    yield
    agentgym_pool._pools.clear()


def say(action: str, thought: str = "I see.") -> dict[str, Any]:
    return {"role": "assistant", "content": f"Thought: {thought}\nAction: {action}"}


def right(kind: str, item: int) -> list[dict[str, Any]]:
    return [say(action) for action in solution(kind, item)]


def first(gym: AgentGym, split: str = "train"):
    return gym.scenarios(split)[0]


def play(gym: AgentGym, actions: list[dict[str, Any]], scenario: Any = None):
    return checks.play(gym, scenario or first(gym), actions)


def failure(gym: AgentGym, actions: list[dict[str, Any]], scenario: Any = None) -> str:
    with pytest.raises(EnvironmentFailed) as caught:
        play(gym, actions, scenario)
    return str(caught.value)


@pytest.fixture
def demonstrations(tmp_path):
    def write(kind: str, items: Any = range(10), prefix: str = "") -> str:
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(trajectories(kind, items, prefix)))
        return str(path)

    return write


def test_every_kind_follows_its_protocol(demonstrations, subtests):
    """Environment contract with invalid actions, success of demonstrations, and the requests of an episode."""
    for kind in KINDS:
        with subtests.test(kind=kind), FakeAgentGym(kind) as server:
            make = partial(AgentGym, kind, server.url, **FEW, demonstrations=demonstrations(kind), instances=2)
            checks.check(make, few=1)
            for format in ("tool", "plain"):
                gym = make(format=format)
                assert bool(gym.tools()) is (format == "tool")
                assert all(checks.solved(gym, scenario) for scenario in gym.scenarios("heldout")[:2])
            assert len(server.instances) <= 2
            server.log.clear()
            gym = make()
            steps = play(gym, right(kind, 0))
            outcome = steps[-1].info
            assert (outcome["success"], outcome["progress"], outcome["invalid_actions"]) == (True, outcome["score"], 0)
            assert sum(step.reward for step in steps) == pytest.approx(outcome["score"])
            observed = ["/observation"] if kind in ("webshop", "webarena") else []
            assert server.paths() == ["/reset", *observed, *["/step"] * len(words(kind, 0))]
            key = "env_idx" if kind in BY_INDEX else "id"
            assert {body[key] for _, _, body in server.log} == {server.log[0][2][key]}
            assert all(set(body) == {key, "action"} for _, path, body in server.log if path.endswith("/step"))


def test_kind_names_match_the_literal():
    hint = get_type_hints(AgentGym.__init__)["kind"]
    assert set(get_args(hint)) == set(KINDS)


def test_thought_and_action_are_parsed():
    cases = {
        "Thought: a\nAction: go": Action("go", "a"),
        "Thought:\na\n\nAction:\ngo to b\n": Action("go to b", "a"),
        "Action: go": Action("go"),
        "I do it. Action: go</s>": Action("go", "I do it."),
        "Thought: a\nAction: go\nObservation: there\nThought: b\nAction: back": Action("go", "a"),
        "Action: f with Action Input: {}": Action("f with Action Input: {}"),
        "Action:": Action(""),
        "go": None,
        "": None,
        "f with Action Input: {}": None,
    }
    assert {text: parse_action(text) for text in cases} == cases


def test_several_actions_are_rejected():
    with pytest.raises(InvalidAction, match="one action at a time"):
        parse_action("Action: go\nAction: back")


def test_actions_are_sent_as_the_servers_read_them():
    cases = {
        ("webshop", "click[Buy Now]\nThat is it."): "click[Buy Now]",
        ("sqlgym", "```sql\nSELECT 1\nFROM t\n```\nas asked"): "SELECT 1\nFROM t",
        ("sqlgym", "SELECT 1"): "SELECT 1",
        ("webarena", "click [3]"): "```click [3]```",
        ("webarena", "now ```stop [N/A]```"): "```stop [N/A]```",
        ("webarena", "```\nnew_tab\n```"): "```new_tab```",
        ("movie", 'finish with Action Input:\n{\n"answer": 1}'): 'Action: finish with Action Input: { "answer": 1}',
        ("textcraft", "craft 1 stick, using 2 planks!"): "craft 1 stick, using 2 planks",
        ("maze", "Up"): "move up",
        ("maze", "move left"): "move left",
        ("wordle", "Crane"): "c r a n e",
        ("wordle", "c r a n e"): "c r a n e",
        ("searchqa", "<answer> x </answer>"): "<think>t</think>\n<answer> x </answer>",
    }
    assert {(kind, text): KINDS[kind].send(Action(text, "t")) for kind, text in cases} == cases


def test_invalid_actions_never_reach_the_server(subtests):
    for format, action, expected in [
        ("react", {"content": "go to apple"}, "error: there is no action. Say what you think"),
        ("react", {"content": "Action: "}, "error: the action is empty"),
        ("react", {"content": "Action: a\nAction: b"}, "error: one action at a time"),
        ("react", {"content": "Action: " + "a" * 30_000}, "error: at most 20000 characters"),
        ("tool", {"content": "go to apple"}, "error: there is no action. Act by the tool act"),
        ("tool", {"tool_calls": [{"id": "c", "function": {"name": "go", "arguments": "{}"}}]}, "error: no tool go."),
        ("tool", {"tool_calls": [{"id": "c", "function": {"name": "act", "arguments": "{"}}]}, "error: the arguments"),
        ("plain", {"content": ""}, "error: the action is empty"),
    ]:
        with subtests.test(format=format, action=action), FakeAgentGym("alfworld") as server:
            gym = AgentGym("alfworld", server.url, format=format, **FEW)
            (step,) = play(gym, [{"role": "assistant", **action}])
            assert step.observation[0]["content"].startswith(expected)
            assert (step.info["invalid_actions"], step.done, step.reward) == (1, False, 0.0)
            assert not server.paths("/step")


def test_the_tool_and_several_calls_in_one_message():
    with FakeAgentGym("alfworld") as server:
        gym = AgentGym("alfworld", server.url, **FEW)
        calls = [call["tool_calls"][0] for call in acts([*solution("alfworld", 0), "go to river"])]
        (step,) = play(gym, [{"role": "assistant", "content": "", "tool_calls": calls}])
        assert [message["tool_call_id"] for message in step.observation] == ["call_0_0", "call_1_0", "call_2_0"]
        assert step.observation[-1]["content"] == "error: the episode is over"
        assert step.done
        assert step.info == {
            "success": True,
            "progress": 1.0,
            "score": 1.0,
            "invalid_actions": 0,
            "task": "pick_and_place/trial_1",
        }
        assert len(server.paths("/step")) == 2


def test_actions_rejected_by_the_server_are_counted():
    with FakeAgentGym("alfworld") as server:
        step = play(AgentGym("alfworld", server.url, **FEW), [say("sing")])[-1]
        assert step.observation[0]["content"].startswith("Nothing happens.\nAvailable actions: go to apple, ")
        assert step.info["invalid_actions"] == 1


def test_episode_ends_after_the_maximum_number_of_rounds():
    with FakeAgentGym("maze") as server:
        gym = AgentGym("maze", server.url, **FEW)
        steps = play(gym, [say("stand")] * 40)
        assert len(steps) == gym.max_turns == 15
        assert (steps[-1].done, steps[-1].info["success"]) == (True, False)
        assert len(play(AgentGym("maze", server.url, max_turns=3, **FEW), [say("stand")] * 40)) == 3
        assert len(server.instances) == 1


def test_scores_are_normalized_to_one():
    """ScienceWorld scores up to 100 and may decrease, BabyAI sums rewards, tool kinds report progress."""
    with FakeAgentGym("sciworld") as server:
        gym = AgentGym("sciworld", server.url, **FEW)
        half, whole = play(gym, right("sciworld", 0))
        assert (half.info["score"], half.info["success"], half.reward) == (0.5, False, 0.5)
        assert (whole.info["score"], whole.info["success"]) == (1.0, True)
        server.faults["/step"] = [Fault(edit=lambda answer: {**answer, "score": -100, "done": True})]
        (lost,) = play(gym, right("sciworld", 0))
        assert (lost.info["score"], lost.info["progress"], lost.info["success"]) == (-1.0, 0.0, False)
    with FakeAgentGym("babyai") as server:
        gym = AgentGym("babyai", server.url, train=[LATE], heldout=1)
        scenario = first(gym)
        (*_, last) = play(gym, [*right("babyai", LATE), *[say("turn left")] * 3], scenario)
        assert server.instances[0].score == pytest.approx(1.2)
        assert (last.info["score"], last.info["success"], last.done) == (0.3, True, False)
    with FakeAgentGym("movie") as server:
        steps = play(AgentGym("movie", server.url, **FEW), [*right("movie", 0)[:-1], say("sing")])
        assert (steps[-1].info["score"], steps[-1].info["success"], steps[-1].info["invalid_actions"]) == (
            0.5,
            False,
            1,
        )


def test_instances_are_reused_within_the_limit():
    with FakeAgentGym("webshop") as server:
        gyms = [AgentGym("webshop", server.url, instances=3, **FEW) for _ in range(8)]

        async def episode(gym: AgentGym) -> bool:
            for scenario in gym.scenarios("train"):
                await gym.reset(scenario)
                for action in right("webshop", scenario.input["item"]):
                    step = await gym.step(action)
                assert step.info["success"]
            await gym.close()
            return True

        async def all_at_once() -> list[bool]:
            return await asyncio.gather(*(episode(gym) for gym in gyms))

        assert all(asyncio.run(all_at_once()))
        assert len(server.instances) == 3
        assert len(server.paths("/create")) == 3
        # Nobody plays in another's instance: between two resets of one, all steps are of one item.
        assert len(server.paths("/reset")) == 48
        # What an agent leaves unfinished goes back too.
        play(gyms[0], right("webshop", 0)[:1])
        checks.asked(gyms[0].close())
        play(gyms[1], right("webshop", 0))
        assert len(server.instances) == 3


def test_episodes_do_not_share_an_instance_that_a_full_server_returns_twice():
    with FakeAgentGym("sqlgym", room=2) as server:
        gyms = [AgentGym("sqlgym", server.url, **FEW) for _ in range(6)]

        async def episode(gym: AgentGym, item: int) -> bool:
            await gym.reset(gym.scenarios("train")[item])
            await asyncio.sleep(0.05)
            return bool((await gym.step(right("sqlgym", item)[0])).info["success"])

        async def all_at_once() -> list[bool]:
            return await asyncio.gather(*(episode(gym, item) for item, gym in enumerate(gyms)))

        assert asyncio.run(all_at_once()) == [True] * 6
        assert len(server.instances) == 2


def test_waiting_for_an_instance_times_out(monkeypatch):
    monkeypatch.setattr(agentgym_pool, "QUEUE", 0.2)
    with FakeAgentGym("maze") as server:
        gym = AgentGym("maze", server.url, instances=1, **FEW)
        other = AgentGym("maze", server.url, instances=1, timeout=0.2, patience=0.0, **FEW)
        play(gym, [say("up")])
        assert "timed out after 0.2 s: all 1 instances are in use" in failure(other, [])


def test_waiting_episodes_are_served_in_order():
    """Two clients alternate on one instance, whether their episodes end or not."""
    with FakeAgentGym("maze") as server:
        gyms = [AgentGym("maze", server.url, instances=1, **FEW) for _ in range(2)]
        order: list[int] = []

        async def episodes(number: int) -> None:
            for scenario in gyms[number].scenarios("train")[:3]:
                await gyms[number].reset(scenario)
                order.append(number)
                await gyms[number].step(say("stand"))
            await gyms[number].close()

        async def both() -> None:
            await asyncio.gather(episodes(0), episodes(1))

        asyncio.run(both())
        assert order == [0, 1, 0, 1, 0, 1]
        assert len(server.instances) == 1


def test_concurrent_clients_are_isolated():
    with FakeAgentGym("textcraft") as server:
        gyms = [AgentGym("textcraft", server.url, **FEW) for _ in range(2)]

        async def episode(gym: AgentGym, item: int) -> list[str]:
            messages = await gym.reset(gym.scenarios("train")[item])
            texts = [messages[-1]["content"]]
            for action in right("textcraft", item):
                texts.append((await gym.step(action)).observation[0]["content"])
            return texts

        async def both() -> list[list[str]]:
            return await asyncio.gather(episode(gyms[0], 0), episode(gyms[1], 1))

        first_texts, second_texts = asyncio.run(both())
        assert first_texts == [f"Item 0, step {n}: {n} right." for n in range(3)]
        assert second_texts == [f"Item 1, step {n}: {n} right." for n in range(4)]


def test_instances_are_closed_at_exit_if_the_server_supports_it():
    for closes in (True, False):
        with FakeAgentGym("webshop", closes=closes) as server:
            play(AgentGym("webshop", server.url, **FEW), right("webshop", 0))
            close_pools()
            assert len(server.instances) == (not closes)
            assert server.paths("/close") == ["/close"]
    with FakeAgentGym("searchqa") as server:
        code = f"""
import asyncio
from components.environments.adapters.agentgym import AgentGym
gym = AgentGym("searchqa", "{server.url}")
asyncio.run(gym.reset(gym.scenarios("train")[0]))
"""
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        assert server.paths("/create", "/close") == ["/create", "/close"]
        assert not server.instances


def test_server_crash_fails_the_episode_and_the_next_one_waits(subtests):
    for kind in ["alfworld", "weather", "searchqa"]:
        with subtests.test(kind=kind), FakeAgentGym(kind) as server:
            gym, other = (AgentGym(kind, server.url, **FEW) for _ in range(2))
            play(gym, right(kind, 1)[:1], gym.scenarios("train")[1])
            play(other, right(kind, 1)[:1], gym.scenarios("train")[1])
            server.stop()
            with pytest.raises(EnvironmentFailed, match=f"POST {server.url}/step .* cannot be reached"):
                checks.asked(gym.step(right(kind, 1)[1]))
            back = threading.Timer(0.5, server.start)
            back.start()
            assert play(gym, right(kind, 0))[-1].info["success"]
            back.join()
            # The other's instance is gone too, though a new one has its number.
            with pytest.raises(EnvironmentFailed, match="restarted during the episode"):
                checks.asked(other.step(right(kind, 1)[1]))
            assert play(other, right(kind, 0))[-1].info["success"]
            assert len(server.instances) == 1


def test_restart_is_detected_at_the_next_reset(subtests):
    for kind in ["alfworld", "weather", "searchqa"]:
        with subtests.test(kind=kind), FakeAgentGym(kind) as server:
            gym = AgentGym(kind, server.url, **FEW)
            play(gym, right(kind, 0))
            server.stop()
            server.start()
            assert play(gym, right(kind, 0))[-1].info["success"]
            assert server.paths("/create", "/reset") == ["/create", "/reset", "/reset", "/create", "/reset"]


def test_instance_created_during_cancellation_is_reused():
    with FakeAgentGym("maze") as server:
        gym = AgentGym("maze", server.url, **FEW)

        async def cut() -> None:
            server.faults["/create"] = [Fault(wait=0.5)]
            task = asyncio.create_task(gym.reset(first(gym)))
            while not server.paths("/create"):
                await asyncio.sleep(0.01)
            task.cancel()
            while not agentgym_pool.pool_of(gym._server)._free:
                await asyncio.sleep(0.01)
            await gym.reset(first(gym))

        asyncio.run(cut())
        assert len(server.instances) == 1


def test_unreachable_server_is_named():
    with FakeAgentGym("maze") as server:
        url = server.url
    text = failure(AgentGym("maze", url, train=5, heldout=1, patience=0.3), [])
    assert f"GET {url}/ cannot be reached" in text
    assert "(retried for 0.3 s)" in text


def test_transient_errors_are_retried_except_for_steps(subtests):
    for status in [429, 502, 503, 504]:
        with subtests.test(status=status), FakeAgentGym("webshop") as server:
            gym = AgentGym("webshop", server.url, **FEW)
            for path in ("/", "/reset", "/observation"):
                server.faults[path] = [Fault(status, b"busy"), Fault(status, b"busy")]
            assert play(gym, right("webshop", 0))[-1].info["success"]
            assert server.paths("/", "/reset", "/observation") == ["/"] * 3 + ["/reset"] * 3 + ["/observation"] * 3
            server.log.clear()
            server.faults["/step"] = [Fault(status, b"busy")]
            text = failure(gym, right("webshop", 0))
            assert f"POST {server.url}/step" in text
            assert f"returned status {status}: b'busy'" in text
            assert len(server.paths("/step")) == 1


def test_lost_responses_to_steps_are_not_retried():
    with FakeAgentGym("sciworld") as server:
        gym = AgentGym("sciworld", server.url, **FEW)
        server.faults["/reset"] = [Fault(cut=True)]
        play(gym, right("sciworld", 0))
        assert len(server.paths("/reset")) == 2
        server.faults["/step"] = [Fault(cut=True)]
        assert "/step" in failure(gym, right("sciworld", 0))
        assert server.instances[0].steps == 1
        server.faults["/create"] = [Fault(503, b"busy")]
        agentgym_pool._pools.clear()
        server.log.clear()
        assert "/create returned status 503" in failure(gym, [])
        assert len(server.paths("/create")) == 1


def test_slow_server_times_out():
    with FakeAgentGym("wordle") as server:
        gym = AgentGym("wordle", server.url, timeout=2.0, **FEW)
        server.faults["/step"] = [Fault(wait=60.0)]
        assert "timed out after 2 s" in failure(gym, right("wordle", 0))
        assert play(gym, right("wordle", 0))[-1].info["success"]


def test_repeatedly_failing_instance_is_retired(caplog):
    with FakeAgentGym("maze") as server:
        gym = AgentGym("maze", server.url, **FEW)
        server.faults["/step"] = [Fault(500, b"broken")] * 3
        for _ in range(3):
            assert "returned status 500: b'broken'" in failure(gym, [say("up")])
        assert "instance 0 of the AgentGym server" in caplog.text
        assert play(gym, right("maze", 0))[-1].info["success"]
        assert len(server.instances) == 2
        assert server.paths("/close") == ["/close"]  # once tried, it is known that there is none


def test_failing_items_do_not_retire_all_instances():
    with FakeAgentGym("weather") as server:
        gym = AgentGym("weather", server.url, **FEW)
        server.faults["/reset"] = [Fault(500, b"Internal Server Error") for _ in range(100)]
        for _ in range(100):
            assert "/reset" in failure(gym, [])
        assert len(server.instances) <= 9


def test_error_with_status_200_fails_the_episode_or_is_shown():
    with FakeAgentGym("textcraft") as server:
        gym = AgentGym("textcraft", server.url, **FEW)
        text = failure(gym, [say("get 1 crash")])
        assert '/step {"id": 0, "action": "get 1 crash"} returned the error' in text
        telling = AgentGym("textcraft", server.url, step_errors="tell", **FEW)
        steps = play(telling, [say("get 1 crash"), *right("textcraft", 0)])
        assert steps[0].observation[0]["content"].startswith("error: 'NoneType' object")
        assert (steps[-1].info["success"], steps[-1].info["invalid_actions"]) == (True, 1)
        server.faults["/step"] = [Fault(body=b'{"error": "The id 0 is not valid."}')]
        assert "is not valid" in failure(telling, right("textcraft", 0))
        over = b'{"error": "The task with environment 0 has finished."}'
        server.faults["/step"] = [Fault(body=over)]
        assert "has finished" in failure(telling, right("textcraft", 0))
        gone = b'{"error": "The task with environment 0 has been deleted."}'
        server.faults["/reset"] = [Fault(body=gone)]
        assert play(telling, right("textcraft", 0))[-1].info["success"]
        server.faults["/create"] = [Fault(body=b'{"error": "no Java"}')]
        agentgym_pool._pools.clear()
        assert "/create {} returned the error 'no Java'" in failure(gym, [])
    with FakeAgentGym("maze") as server:
        gym = AgentGym("maze", server.url, **FEW)
        server.faults["/reset"] = [Fault(body=b'{"error": "The game 0 is not valid."}')]
        assert "The game 0 is not valid." in failure(gym, [])
        assert len(server.instances) == 1


STEP = {"observation": "x", "reward": 0.0, "done": False}


def test_malformed_responses_fail_the_episode(subtests):
    for body, expected in [
        (b"", "returned invalid JSON"),
        (b"<html>", "returned invalid JSON"),
        (b"\xff\xfe", "returned invalid JSON"),
        (b"[" * 100_000, "returned invalid JSON"),
        (json.dumps(STEP | {"reward": float("nan")}).encode(), "NaN is no JSON number"),
        (b'{"observation": "x", "reward": 1e999, "done": false}', "the number 1e999 is too large"),
        (json.dumps(STEP | {"reward": "1"}).encode(), "not a finite number"),
        (json.dumps(STEP | {"reward": None}).encode(), "not a finite number"),
        (json.dumps(STEP | {"done": "no"}).encode(), "must be true or false"),
        (json.dumps(STEP | {"observation": None}).encode(), "has no observation"),
        (b'{"observation": "x"}', "not a valid step"),
        (b"[]", "not a valid step"),
        (b"null", "not a valid step"),
        (b" " * (LIMITS.size + 1), f"more than {LIMITS.size} bytes"),
    ]:
        with subtests.test(body=body[:60]), FakeAgentGym("textcraft") as server:
            gym = AgentGym("textcraft", server.url, **FEW)
            server.faults["/step"] = [Fault(body=body)]
            text = failure(gym, right("textcraft", 0))
            assert expected in text
            assert server.url in text
            assert len(text) < 1500
            server.faults["/reset"] = [Fault(body=b'{"observation": 7}')]
            assert "has no observation" in failure(gym, [])
            server.faults["/create"] = [Fault(body=b'{"id": true}')]
            agentgym_pool._pools.clear()
            assert "has no instance number" in failure(gym, [])


def test_long_observations_are_truncated_and_surrogates_replaced():
    with FakeAgentGym("textcraft") as server:
        gym = AgentGym("textcraft", server.url, max_observation=100, **FEW)
        server.faults["/step"] = [Fault(edit=lambda answer: {**answer, "observation": "\ud83dab" * 100_000})]
        step = play(gym, right("textcraft", 0))[0]
        assert step.observation[0]["content"] == "?ab" * 33 + "?\n... (299900 characters are left out)"
        play(gym, [say("get 1 \ud83d")])


def test_cancelled_episode_releases_its_instance():
    """After a timeout during a step, the instance is reused, after the healthy ones."""
    with FakeAgentGym("maze") as server:
        gym = AgentGym("maze", server.url, **FEW)

        async def cut() -> None:
            await gym.reset(first(gym))
            server.faults["/step"] = [Fault(wait=0.5)]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await gym.step(say("up"))
            await gym.close()

        asyncio.run(cut())
        time.sleep(0.6)
        assert play(gym, right("maze", 0))[-1].info["success"]
        assert len(server.instances) == 1


def test_proxies_are_ignored_for_localhost(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with FakeAgentGym("maze") as server:
        assert play(AgentGym("maze", server.url, **FEW), right("maze", 0))[-1].info["success"]
        below = AgentGym("maze", f"{server.url}/maze/", **FEW)
        assert play(below, right("maze", 0))[-1].info["success"]


def items(gym: AgentGym, split: str) -> list[int]:
    return [scenario.input["item"] for scenario in gym.scenarios(split)]


def test_items_by_number_range_list_and_file(tmp_path):
    url = "http://127.0.0.1:1"
    gym = AgentGym("webshop", url, train=3, heldout=2)
    assert (items(gym, "train"), items(gym, "heldout")) == ([0, 1, 2], [3, 4])
    assert [scenario.id for scenario in gym.scenarios("train")] == ["webshop_0", "webshop_1", "webshop_2"]
    gym = AgentGym("webshop", url, train=[7, "10-12"], heldout="0-1")
    assert (items(gym, "train"), items(gym, "heldout")) == ([7, 10, 11, 12], [0, 1])
    path = tmp_path / "eval.json"
    names = ["webshop_5238", "webshop_0007", "sciworld_3", "webshop_5238"]
    records = [{"item_id": name, "conversations": None} for name in names]
    path.write_text(json.dumps([*records, {"item_id": "webshop_9", "type": "shoes", "difficulty": 2}]))
    gym = AgentGym("webshop", url, train=5, heldout=str(path))
    assert items(gym, "heldout") == [5238, 7, 9]
    assert [(scenario.type, scenario.difficulty) for scenario in gym.scenarios("heldout")] == [
        ("webshop", 0),
        ("webshop", 0),
        ("shoes", 2),
    ]
    path.write_text(json.dumps([{"item_id": "bird_3"}, {"item_id": "lmrlgym_maze_4"}]))
    assert items(AgentGym("sqlgym", url, heldout=str(path), train="10-11"), "heldout") == [3]
    assert items(AgentGym("maze", url, heldout=str(path), train="10-11"), "heldout") == [4]


def test_types_and_difficulties_follow_from_item_numbers():
    url = "http://127.0.0.1:1"
    babyai = AgentGym("babyai", url, train=80, heldout=1).scenarios("train")
    assert [(babyai[n].type, babyai[n].difficulty) for n in (0, 23, 39, 40)] == [
        ("go to", 1),
        ("unlock", 3),
        ("synth", 5),
        ("go to", 1),
    ]
    searchqa = AgentGym("searchqa", url, train="0-0", heldout=[40000]).scenarios
    assert [(scenario.type, scenario.difficulty) for scenario in (*searchqa("train"), *searchqa("heldout"))] == [
        ("nq", 1),
        ("2wikimultihopqa", 2),
    ]


def test_invalid_configuration_is_rejected(subtests):
    for kind, options, expected in [
        ("maze", {"train": 26}, "environment.heldout: contains item 26; maze has items 0 to 25"),
        ("webshop", {"train": 0}, "environment.train: contains 0 items"),
        ("webshop", {"train": "0-99999999"}, "environment.train: contains 100000000 items"),
        ("webshop", {"train": ["a"]}, "environment.train: contains 'a'; expected numbers and ranges"),
        ("webshop", {"train": [1, "0-3"]}, "environment.train: contains item 1 twice"),
        ("webshop", {"train": [-1]}, "environment.train: contains item -1"),
        ("webshop", {"train": 5, "heldout": "4-6"}, "environment.heldout: contains item 4, which is also in train"),
        ("webshop", {"url": "127.0.0.1:80"}, "environment.url: '127.0.0.1:80': expected an address"),
        ("webshop", {"url": "http://[::1"}, "expected an address"),
        ("webshop", {"url": "http://a:99999999"}, "expected an address"),
        ("shop", {}, "environment.kind: 'shop': expected one of webshop, sqlgym"),
    ]:
        with subtests.test(options=options):
            with pytest.raises(SpecError) as caught:
                AgentGym(**{"kind": kind, "url": "http://127.0.0.1:1", **options}).scenarios("train")
            assert expected in str(caught.value)


def test_password_in_the_url_is_rejected_and_not_shown():
    with pytest.raises(SpecError, match="contains a user name or a password") as caught:
        AgentGym("maze", "http://me:secret@there:1")
    assert "secret" not in str(caught.value)


def test_invalid_file_is_rejected(tmp_path, subtests):
    for content, expected in [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("{}", "contains dict; expected a list"),
        ("[]", "has no items of webshop"),
        ('[{"item_id": "maze_1"}]', "has no items of webshop; it has items of maze"),
        ('[{"item_id": "webshop"}]', "record 0 has the item_id 'webshop'"),
        ('[{"item": 3}]', "record 0 has the item_id None"),
        ('[{"item_id": "webshop_1", "conversations": [{"from": "gpt"}]}]', "record 0 has the message"),
        ('[{"item_id": "webshop_1", "conversations": 5}]', "record 0 has the message"),
        ('[{"item_id": "webshop_1", "difficulty": "hard"}]', "difficulty 'hard'"),
    ]:
        with subtests.test(content=content):
            path = tmp_path / "items.json"
            path.write_text(content)
            with pytest.raises(SpecError) as caught:
                AgentGym("webshop", "http://127.0.0.1:1", train=str(path)).scenarios("train")
            assert expected in str(caught.value)
            with pytest.raises(ResourceError, match=r"environment.train: .*No such file"):
                AgentGym("webshop", "http://127.0.0.1:1", train=str(path) + "l").scenarios("train")


def test_demonstrations_follow_the_format(demonstrations):
    path = demonstrations("alfworld", [0])
    url = "http://127.0.0.1:1"
    gyms = {
        format: AgentGym("alfworld", url, format=format, demonstrations=path) for format in ("react", "tool", "plain")
    }
    react, tool, plain = (gym.solve(first(gym))[0] for gym in gyms.values())
    assert react["content"] == "Thought:\nWord 0.\n\nAction:\ngo to apple"
    assert (tool["content"], tool["tool_calls"][0]["function"]["arguments"]) == ("Word 0.", '{"action": "go to apple"}')
    assert plain == {"role": "assistant", "content": "go to apple"}
    only = AgentGym("alfworld", url, train=path, heldout="1-2", demonstrations=path)
    assert items(only, "train") == [0]
    with pytest.raises(SpecError, match=r"has no demonstration of alfworld_1; to train on the demonstrated items"):
        only.solve(first(only, "heldout"))
    with pytest.raises(SpecError, match=r"environment.demonstrations: null"):
        AgentGym("alfworld", url).solve(first(only))


def test_missing_demonstrations_are_reported_before_the_run(demonstrations):
    from flows.experiment.compose import compose

    path = demonstrations("alfworld", [0])
    lines = ["environment=agentgym", "environment.kind=alfworld", "environment.url=http://127.0.0.1:1"]
    with pytest.raises(SpecError, match=r"environment\.demonstrations: .* has no demonstration of alfworld_\d"):
        compose([*lines, f"environment.demonstrations={path}"])
    with pytest.raises(SpecError, match=r"environment\.demonstrations: null, but demonstrations are required"):
        compose(lines)
    assert compose([*lines, "warmup=none"]).warmup is None


def test_without_loss_marks_all_messages_but_the_first_are_used(tmp_path):
    path = tmp_path / "traj.json"
    data = trajectories("maze", [0])
    for message in data[0]["conversations"]:
        del message["loss"]
    path.write_text(json.dumps(data))
    gym = AgentGym("maze", "http://127.0.0.1:1", train=5, heldout=1, demonstrations=str(path))
    assert len(gym.solve(first(gym))) == len(solution("maze", 0))


def test_stage_key_depends_on_file_content_not_on_path_or_server(demonstrations, tmp_path):
    def key(url: str, path: str, **other: Any) -> str:
        data = {
            "_target_": "components.environments.adapters.agentgym.AgentGym",
            "kind": "maze",
            "url": url,
            "train": path,
        }
        target = TypeAdapter(Target).validate_python({**data, "heldout": "20-25", **other}, context={"allow": []})
        return json.dumps(target.resolved())

    path = demonstrations("maze")
    moved = tmp_path / "elsewhere.json"
    moved.write_text(Path(path).read_text())
    original = key("http://a:1", path)
    assert original == key("http://b:2", str(moved), timeout=3.0)
    moved.write_text(json.dumps(trajectories("maze", range(9))))
    assert original != key("http://a:1", str(moved))
    assert original != key("http://a:1", path, max_turns=3)
