"""Tests of custom agents: calls of the endpoint are recorded as the trajectory, with any library."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import openai
import pytest

from components.errors import EngineError, SpecError
from components.inference.protocol import Sampling
from components.rollout.capture import Capture
from components.rollout.own_agent import MODEL, OwnAgent
from components.rollout.players.player import Player
from components.trajectories.schema import History, Message, Trajectory
from components.trajectories.truncation import LIMITS
from tests.rollout.worlds import Echo, Parrot, collect, discard_litellm_clients, endpoint, scenarios


def played(function, *, count=1, engine=None, **options):
    engine = engine or Parrot()
    with endpoint(engine, function) as (own, _, engines):
        trajectories = collect(engine, Echo, scenarios(count), player=Player(own), **options)
        assert engines == {}, "a key is good for one episode"
    return trajectories


def ask(url: str, key: str, messages: list, **more) -> dict:
    """Send a chat completion request and return the message."""
    body = json.dumps({"model": MODEL, "messages": messages} | more).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(f"{url}/chat/completions", body, headers), timeout=600) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        error.close()
        raise


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def plain(scenario, base_url, api_key):
    talk = [user(f"Say {scenario.input['number']}.")]
    talk.append(ask(base_url, api_key, talk))
    talk.append(user("Again."))
    ask(base_url, api_key, talk)
    return 0.5


async def with_openai(scenario, client):
    talk = [user(f"Say {scenario.input['number']}.")]
    first = await client.chat.completions.create(model=MODEL, messages=talk)
    talk += [{"role": "assistant", "content": first.choices[0].message.content}, user("Again.")]
    await client.chat.completions.create(model=MODEL, messages=talk)
    return 0.5


async def with_openai_streaming(scenario, client):
    talk = [user(f"Say {scenario.input['number']}.")]
    for _ in range(2):
        stream = await client.chat.completions.create(model=MODEL, messages=talk, stream=True)
        said = "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])
        talk += [{"role": "assistant", "content": said}, user("Again.")]
    return 0.5


def with_openai_in_a_thread(scenario, client):
    talk = [user(f"Say {scenario.input['number']}.")]
    for _ in range(2):
        answer = client.chat.completions.create(model=MODEL, messages=talk)
        talk += [{"role": "assistant", "content": answer.choices[0].message.content}, user("Again.")]
    return 0.5


async def with_responses(scenario, client):
    first = await client.responses.create(model=MODEL, input=f"Say {scenario.input['number']}.")
    await client.responses.create(model=MODEL, input="Again.", previous_response_id=first.id)
    return 0.5


async def with_responses_streaming(scenario, client):
    talk: list = [user(f"Say {scenario.input['number']}.")]
    for _ in range(2):
        async with client.responses.stream(model=MODEL, input=talk) as stream:
            talk += [*(await stream.get_final_response()).output, user("Again.")]
    return 0.5


async def with_litellm_responses(scenario, base_url, api_key, model):
    import litellm

    talk: list = [user(f"Say {scenario.input['number']}.")]
    for _ in range(2):
        answer = await litellm.aresponses(model=f"openai/{model}", input=talk, api_base=base_url, api_key=api_key)
        talk += [*(item.model_dump(exclude_none=True) for item in answer.output), user("Again.")]
    return 0.5


def in_javascript(scenario, base_url, api_key):
    """An agent in another process and language, which only has the URL and the API key."""
    code = """
const [url, key, first] = process.argv.slice(1);
const ask = async messages => {
  const headers = { "content-type": "application/json", authorization: `Bearer ${key}` };
  const body = JSON.stringify({ model: "policy", messages });
  const answer = await fetch(`${url}/chat/completions`, { method: "POST", headers, body });
  return (await answer.json()).choices[0].message;
};
(async () => {
  const talk = [{ role: "user", content: first }];
  talk.push(await ask(talk), { role: "user", content: "Again." });
  await ask(talk);
})();
"""
    said = f"Say {scenario.input['number']}."
    subprocess.run(["node", "-e", code, base_url, api_key, said], check=True, timeout=600)
    return 0.5


def with_curl(scenario, base_url, api_key):
    def ask(**body):
        data = json.dumps({"model": MODEL, **body})
        headers = ["-H", "content-type: application/json", "-H", f"authorization: Bearer {api_key}"]
        command = ["curl", "--silent", "--fail", "--noproxy", "*", *headers, "-d", data, f"{base_url}/responses"]
        return json.loads(subprocess.run(command, check=True, timeout=600, capture_output=True).stdout)

    first = ask(input=f"Say {scenario.input['number']}.")
    ask(input="Again.", previous_response_id=first["id"])
    return 0.5


AGENTS = [
    plain,
    with_openai,
    with_openai_streaming,
    with_openai_in_a_thread,
    with_responses,
    with_responses_streaming,
    pytest.param(with_litellm_responses, marks=pytest.mark.skipif(not find_spec("mcp"), reason="litellm wants mcp")),
    pytest.param(in_javascript, marks=pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")),
    pytest.param(with_curl, marks=pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning")
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
def test_what_it_says_is_the_trajectory(agent):
    if "litellm" in agent.__name__:
        import litellm  # noqa: F401  it takes seconds, which are not the episode's
    expected = played(plain)
    trajectories = played(agent, timeout=600.0)
    if "litellm" in agent.__name__:
        discard_litellm_clients()
    for trajectory, other in zip(trajectories, expected, strict=True):
        assert trajectory.failure is None
        assert trajectory.outcome == {"reward": 0.5}
        assert repr(trajectory.histories) == repr(other.histories)  # NaN is not equal to itself
        (history,) = trajectory.histories
        said = [history.token_ids[slice(*message.span)] for message in history.messages if message.span]
        assert len(said) == 2
        assert ["".join(map(chr, ids)) for ids in said] == [
            message.content for message in history.messages if message.role == "assistant"
        ]
        assert trajectory.metrics["turns"] == 2


def test_the_distribution_is_the_collectors():
    engine = Parrot()

    def wild(base_url, api_key):
        ask(base_url, api_key, [user("x")], temperature=0.1, top_p=0.2, max_tokens=4000, seed=5)

    (trajectory, *_) = played(wild, engine=engine, sampling=Sampling(temperature=0.7, max_tokens=8))
    asked = engine.requests[0]
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.max_tokens) == (0.7, 1.0, 8)
    assert trajectory.sampling["temperature"] == 0.7


def test_calls_at_the_same_time_may_come_in_any_order():
    def eager(scenario, base_url, api_key):
        def send(number):
            time.sleep(0.03 * ((number * 7 + delay[0]) % 5))
            return ask(base_url, api_key, [user(f"part {number % 3}")])

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(send, range(6)))

    delay = [0]
    first = played(eager, max_turns=10)
    delay = [3]
    second = played(eager, max_turns=10)

    def texts(trajectories):
        return [sorted(repr(history) for history in trajectory.histories) for trajectory in trajectories]

    assert texts(first) == texts(second)
    assert [len(trajectory.histories) for trajectory in first] == [6, 6]
    said = {history.messages[-1].content for history in first[0].histories}
    assert len(said) == 6  # two answers to the same question are two draws


def test_histories_that_begin_at_the_same_time_have_an_order_of_their_own():
    async def agent(scenario, client):
        async def work(number):
            talk = [user(f"part {number}")]
            for _ in range(2):
                answer = await client.chat.completions.create(model=MODEL, messages=talk)
                talk += [{"role": "assistant", "content": answer.choices[0].message.content}, user("go on")]

        await client.chat.completions.create(model=MODEL, messages=[user("plan")])
        await asyncio.gather(*(work(number) for number in (4, 0, 3, 1, 2)))

    def once(forwards: bool):
        waiting: list[str] = []

        class Late(Parrot):
            """Responds after all five requests have arrived, in varying order."""

            async def chat(self, request):
                if len(request.messages) == 1 and request.messages[0]["content"] != "plan":
                    waiting.append(request.messages[0]["content"])
                    while len(waiting) < 5:
                        await asyncio.sleep(0.01)
                    place = sorted(waiting).index(request.messages[0]["content"])
                    await asyncio.sleep(0.05 * (place if forwards else 4 - place))
                return await super().chat(request)

        (trajectories,) = played(agent, engine=Late(), max_turns=20, group_size=1)
        return trajectories

    trajectory, other = once(True), once(False)
    assert [history.messages[0].content for history in trajectory.histories] == [
        "plan",
        *(f"part {n}" for n in range(5)),
    ]
    assert repr(trajectory.histories) == repr(other.histories)


def test_the_tools_of_sub_agents_at_the_same_time_do_not_depend_on_who_is_answered_first():
    def tool(name):
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}

    async def agent(scenario, client):
        async def work(name):
            await client.chat.completions.create(model=MODEL, messages=[user(name)], tools=[tool(name)])

        await asyncio.gather(work("ask"), work("buy"))

    def once(slow: str):
        class Late(Parrot):
            async def chat(self, request):
                await asyncio.sleep(0.3 if request.messages[0]["content"] == slow else 0.1)
                return await super().chat(request)

        (trajectories,) = played(agent, engine=Late(), group_size=1)
        return trajectories

    trajectories = [once("ask"), once("buy")]
    assert [trajectory.histories[0].messages[0].content for trajectory in trajectories] == ["ask", "ask"]
    assert [trajectory.tools[0]["function"]["name"] for trajectory in trajectories] == ["ask", "ask"]


class Clumsy(Parrot):
    """An engine that writes an invalid call, then an answer."""

    async def chat(self, request):
        trajectories = await super().chat(request)
        if len(request.messages) == 1:
            call = {"id": "c0", "type": "function", "function": {"name": "look_up", "arguments": '{"order": K1'}}
            trajectories.message["tool_calls"] = [call]
        return trajectories


def with_chat_completions(base_url, api_key):
    first = ask(base_url, api_key, [user("where is it?")])
    told = {"role": "tool", "tool_call_id": "c0", "content": "error: no JSON object"}
    ask(base_url, api_key, [user("where is it?"), first, told])


async def with_response_items(client):
    talk: list = [user("where is it?")]
    answer = await client.responses.create(model=MODEL, input=talk, store=False)
    talk += [*answer.output, {"type": "function_call_output", "call_id": "c0", "output": "error: no JSON object"}]
    await client.responses.create(model=MODEL, input=talk, store=False)


@pytest.mark.parametrize("agent", [with_chat_completions, with_response_items], ids=lambda agent: agent.__name__)
def test_a_call_that_cannot_be_read_is_taken_back_from_whom_it_was_said_to(agent):
    engine = Clumsy()
    (trajectory,) = played(agent, engine=engine, group_size=1)
    assert trajectory.failure is None
    assert engine.requests[1].messages[1]["tool_calls"][0]["function"]["arguments"] == '{"order": K1'
    assert [len(history.messages) for history in trajectory.histories] == [4]


def test_a_call_that_cannot_be_read_and_that_nobody_said_is_refused():
    def agent(base_url, api_key):
        call = {"id": "c0", "type": "function", "function": {"name": "look_up", "arguments": "{oops"}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(base_url, api_key, [user("x"), said, {"role": "tool", "tool_call_id": "c0", "content": "y"}])
        return 1.0

    (trajectory,) = played(agent, engine=Clumsy(), group_size=1)
    assert (trajectory.failure, trajectory.outcome) == (None, {"reward": 1.0})


def test_sub_agents_and_compacted_contexts_are_histories_of_their_own():
    def agent(base_url, api_key):
        main, helper = [user("plan")], [user("look it up")]
        main.append(ask(base_url, api_key, main))
        helper.append(ask(base_url, api_key, helper))
        main.append(user("go on"))
        main.append(ask(base_url, api_key, main))
        helper.append(user("and then"))
        helper.append(ask(base_url, api_key, helper))
        ask(base_url, api_key, [user("summary of it all")])

    (trajectory, *_) = played(agent, max_turns=10)
    first = [history.messages[0].content for history in trajectory.histories]
    assert first == ["plan", "look it up", "summary of it all"]
    assert [sum(message.role == "assistant" for message in history.messages) for history in trajectory.histories] == [
        2,
        2,
        1,
    ]
    sampled = [sum(history.sampled_mask()) for history in trajectory.histories]
    assert sum(sampled) == trajectory.metrics["sampled_tokens"]


def test_several_agents_by_name_are_histories_of_their_own(tmp_path):
    """A planner and a worker, requested as `policy:NAME`: one trajectory in which both are trained on."""

    def agent(base_url, api_key):
        def ask_as(name, messages):
            return ask(base_url, api_key, messages, model=f"{MODEL}:{name}")

        plan = [user("divide the work")]
        plan.append(ask_as("planner", plan))
        work = [user("divide the work")]  # the same words: still the worker's own
        work.append(ask_as("worker", work))
        work.append(user("go on"))
        ask_as("worker", work)
        plan.append(user("done: put it together"))
        ask_as("planner", plan)
        return 1.0

    (trajectory, *_) = played(agent, max_turns=10)
    assert trajectory.failure is None
    assert [history.agent for history in trajectory.histories] == ["planner", "worker"]
    assert [sum(message.span is not None for message in history.messages) for history in trajectory.histories] == [2, 2]
    assert trajectory.histories[0].messages[1].content != trajectory.histories[1].messages[1].content
    from components.algorithms.policy.reference_logprobs import ReferenceLogprobs
    from components.algorithms.policy_gradient.spec import GRPOSpec
    from components.algorithms.policy_gradient.training_data import Learning

    learning = Learning(GRPOSpec(), ReferenceLogprobs(tmp_path))
    learning.advantages[trajectory.id] = [1.0] * int(trajectory.metrics["sampled_tokens"])
    learned = Counter(token for _, pack in learning.packs([trajectory]) for token in pack.lay_out().token_S.tolist())
    sampled = [
        history.token_ids[at]
        for history in trajectory.histories
        for at, own in enumerate(history.sampled_mask())
        if own
    ]
    assert learned == Counter(sampled)


def test_a_name_that_no_agent_can_have_is_refused():
    with endpoint(Parrot(), plain) as (_, url, engines):
        engines["key"] = Capture(Parrot(), Sampling(), 0, 5)
        for name in ("", "a b", "x" * 65):
            with pytest.raises(urllib.error.HTTPError) as caught:
                ask(url, "key", [user("x")], model=f"{MODEL}:{name}")
            assert caught.value.code == 404


def returning(values: list) -> list[Trajectory]:
    """Return an episode of agents that return these values, in order."""
    return played(lambda scenario: values[scenario.input["number"]], count=len(values), group_size=1)


def test_what_it_returns_is_the_outcome():
    trajectories = returning([1, True, None, {"success": True, "steps": 3}])
    assert [trajectory.failure for trajectory in trajectories] == [None] * 4
    expected = [{"reward": 1.0}, {"reward": 1.0}, {}, {"success": True, "steps": 3}]
    assert [trajectory.outcome for trajectory in trajectories] == expected


def test_a_trajectory_of_its_own_is_taken():
    def agent(scenario):
        talk = History([Message("user", "a"), Message("assistant", "b")])
        return Trajectory("mine", scenario, 7, [talk], outcome={"success": True}, step_rewards=[0.25])

    first, second = played(agent)
    assert (first.id, second.id) == ("s0/0", "s0/1")
    assert first.success
    assert first.step_rewards == [0.25]
    assert [message.content for message in first.histories[0].messages] == ["a", "b"]


def test_what_it_may_not_return_fails_the_episode():
    own = [
        {"outcome": {"success": "no"}},
        {"outcome": {"x": {1}}},
        {"step_rewards": [float("nan")]},
        {"metrics": {"m": "x"}},
    ]
    trajectories = [Trajectory("mine", scenarios(1)[0], 0, [], **changes) for changes in own]
    values = ["good", float("nan"), {"x": float("inf")}, {"f": open}, object(), *trajectories]
    for value, trajectory in zip(values, returning(values), strict=True):
        assert trajectory.failure is not None, value
        assert (trajectory.failure.boundary, trajectory.failure.kind) == ("agent", "AgentError"), value


def test_an_agent_that_raises_fails_its_episode_and_keeps_what_was_said():
    def agent(scenario, base_url, api_key):
        ask(base_url, api_key, [user("x")])
        if scenario.input["number"] == 1:
            raise KeyError("no such page")
        return 1.0

    trajectories = played(agent, count=2)
    assert [trajectory.failure is None for trajectory in trajectories] == [True, True, False, False]
    assert trajectories[2].failure.boundary == "agent"
    assert trajectories[2].failure.message.startswith("KeyError: 'no such page' (tests/rollout/test_own_agent.py:")
    assert len(trajectories[2].histories[0].messages) == 2


def test_an_agent_that_does_not_take_a_refusal_runs_out_of_time():
    async def stubborn(client):
        while True:
            with contextlib.suppress(openai.APIError):
                await client.chat.completions.create(model=MODEL, messages=[user("more")])

    (trajectory,) = played(stubborn, max_turns=2, group_size=1, timeout=2)
    assert trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("agent", "WaitTimeout")
    assert trajectory.metrics["turns"] == 2


def test_only_the_refusal_of_a_further_call_is_forgiven():
    """Agents that raise after their last call."""

    def goes_on(base_url, api_key):
        while True:
            ask(base_url, api_key, [user("more")])

    def wraps(base_url, api_key):
        try:
            goes_on(base_url, api_key)
        except urllib.error.HTTPError as error:
            raise RuntimeError("my model failed") from error

    def in_a_process(base_url, api_key):
        subprocess.run([sys.executable, "-c", "raise SystemExit(1)"], check=True)

    def used_up(base_url, api_key):
        with contextlib.suppress(urllib.error.HTTPError):
            goes_on(base_url, api_key)

    def then(trouble):
        def agent(base_url, api_key):
            used_up(base_url, api_key)
            trouble(base_url, api_key)

        return agent

    def bug(base_url, api_key):
        raise KeyError("no such page")

    def stopped_in_time(base_url, api_key):
        for _ in range(3):
            ask(base_url, api_key, [user("more")])
        raise KeyError("no such page")

    for agent in (goes_on, wraps, then(in_a_process)):
        (trajectory, *_) = played(agent, max_turns=3)
        assert (trajectory.failure, trajectory.outcome, trajectory.metrics["turns"]) == (None, {}, 3), agent
    for agent in (then(bug), stopped_in_time):
        (trajectory, *_) = played(agent, max_turns=3)
        assert trajectory.failure is not None
        assert trajectory.failure.message.startswith("KeyError: 'no such page' (tests/rollout/test_own_agent.py:")
        assert not any(limit in trajectory.metrics for limit in LIMITS)


def test_an_answer_that_the_agent_gave_up_is_not_trained_on():
    """A repeated request gets the same response, so client timeouts do not change an episode."""
    slow = [0.8, 0.0, 0.0]

    class Slow(Parrot):
        async def chat(self, request):
            await asyncio.sleep(slow.pop(0) if slow else 0.0)
            return await super().chat(request)

    async def impatient(base_url, api_key):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        async with client:
            with contextlib.suppress(openai.APITimeoutError):
                await client.with_options(timeout=0.3).chat.completions.create(model=MODEL, messages=[user("x")])
            await asyncio.sleep(1.0)  # until it would have been there
            await client.chat.completions.create(model=MODEL, messages=[user("x")])

    (trajectory,) = played(impatient, engine=Slow(), group_size=1)
    (other,) = played(lambda base_url, api_key: ask(base_url, api_key, [user("x")]) and None, group_size=1)
    assert trajectory.failure is None
    assert repr(trajectory.histories) == repr(other.histories)
    assert trajectory.metrics["turns"] == 1


def test_several_answers_are_all_recorded_or_none():
    def agent(base_url, api_key):
        ask(base_url, api_key, [user("x")], n=2)
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(base_url, api_key, [user("x")], n=2)
        assert caught.value.code == 403
        caught.value.close()
        ask(base_url, api_key, [user("y")])

    (trajectory, *_) = played(agent, max_turns=3)
    assert trajectory.failure is None
    assert [history.messages[0].content for history in trajectory.histories] == ["x", "x", "y"]

    def fail(request):
        if failing and len(engine.requests) % 2 == 0:
            raise EngineError("out of memory")

    def careless(base_url, api_key):
        with contextlib.suppress(urllib.error.HTTPError):
            ask(base_url, api_key, [user("x")], n=2)
        failing.clear()
        ask(base_url, api_key, [user("x")])

    engine, failing = Parrot(fail=fail), [True]
    (trajectory,) = played(careless, engine=engine, group_size=1)
    assert trajectory.failure is None
    assert [len(history.messages) for history in trajectory.histories] == [2]


def test_an_agent_that_hangs_runs_out_of_time_and_its_late_calls_are_refused():
    refused = threading.Event()

    def agent(base_url, api_key):
        ask(base_url, api_key, [user("first")])
        time.sleep(1.5)
        try:
            ask(base_url, api_key, [user("late")])
        except urllib.error.HTTPError as error:
            if error.code == 401:
                refused.set()

    engine = Parrot()
    with endpoint(engine, agent) as (own, _, _):
        (trajectory,) = collect(engine, Echo, scenarios(1), player=Player(own), timeout=0.8, group_size=1)
        assert refused.wait(600)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "WaitTimeout"
    assert len(trajectory.histories) == 1


def test_without_a_key_nobody_answers():
    engine = Parrot()
    with endpoint(engine, plain) as (_, url, _):
        for key in ("", "guessed"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                ask(url, key, [user("x")])
            assert caught.value.code == 401
            caught.value.close()
    assert engine.requests == []


def test_an_engine_that_fails_is_no_zero_of_the_agents():
    def fail(_):
        raise EngineError("the machine is gone")

    def careless(base_url, api_key):
        try:
            ask(base_url, api_key, [user("x")])
        except urllib.error.HTTPError as error:
            error.close()
        return 0.0

    (trajectory, *_) = played(careless, engine=Parrot(fail=fail))
    assert trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.message) == ("engine", "the machine is gone")


def test_a_task_that_it_cancels_is_its_own_affair():
    async def agent(scenario):
        task = asyncio.ensure_future(asyncio.sleep(10))
        task.cancel()
        await task

    (trajectory, *_) = played(agent)
    assert trajectory.failure is not None
    assert "CancelledError" in trajectory.failure.message


def test_a_thread_that_hangs_has_its_environment_to_itself():
    used: list[int] = []

    def agent(scenario, environment):
        used.append(id(environment))
        held.append(environment)  # so that no other gets its address
        if len(used) == 1:
            time.sleep(1.0)
        return 1.0

    held: list = []
    trajectories = played(agent, count=2, concurrency=1, timeout=0.4)
    assert [trajectory.failure is None for trajectory in trajectories] == [False, True, True, True]
    assert used[1] != used[0]
    assert len(set(used[1:])) == 1


def test_an_object_may_be_an_agent():
    class Mine:
        async def __call__(self, scenario, client):
            return await with_openai(scenario, client)

    (trajectory, *_) = played(Mine())
    assert trajectory.failure is None
    assert trajectory.metrics["turns"] == 2


def test_it_may_play_in_an_environment_of_its_own():
    def agent(scenario, environment, base_url, api_key):
        talk = environment.reset(scenario)
        while True:
            talk.append(ask(base_url, api_key, talk))
            step = environment.step(talk[-1])
            talk += step.observation
            if step.done:
                return step.info

    (trajectory, *_) = played(agent)
    assert trajectory.success
    assert len(trajectory.outcome["said"]) == 2


def test_an_argument_that_nobody_has_is_named():
    with pytest.raises(SpecError, match=r"agent\.function.*browser.*expected some of scenario, sample, client"):
        OwnAgent(lambda scenario, browser: None, "http://there", {})


def test_after_its_end_an_episode_records_nothing():
    async def late():
        engine = Parrot(seconds=0.2)
        capture = Capture(engine, Sampling(max_tokens=4), 0, 5)
        from components.inference.protocol import ChatRequest

        under_way = asyncio.create_task(capture.chat(ChatRequest([user("x")])))
        await asyncio.sleep(0.05)
        capture.close()
        with pytest.raises(asyncio.CancelledError):
            await under_way
        with pytest.raises(EngineError, match="over"):
            await capture.chat(ChatRequest([user("y")]))
        assert capture.recorder.histories == []

    asyncio.run(late())
