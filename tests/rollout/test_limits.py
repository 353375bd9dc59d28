"""Tests of the collector's limits: instances, time, retries. None of them changes the result of an episode."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.error
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from components.errors import (
    ContextOverflow,
    EnvironmentFailed,
    EnvironmentUnavailable,
    Problem,
    ResourceError,
    SpecError,
    TooManyFailures,
)
from components.evaluation.metrics import pass_at_k, summarise
from components.exceptions import passes
from components.inference.protocol import Sampling
from components.rewards.rules.outcome import Outcome
from components.rollout import collector
from components.rollout.collector import failures_allowed
from components.rollout.players.player import Player
from components.rollout.pool import EnvironmentPool
from components.trajectories.truncation import CALLS, CONTEXT, LIMITS, MESSAGES, TURNS, is_truncated, limit_texts
from flows.stages import episode_failures
from flows.stages.episode_figures import figures
from tests.rollout.test_own_agent import ask, user
from tests.rollout.worlds import AsyncEcho, Echo, Parrot, collect, endpoint, play, scenarios


@pytest.fixture(autouse=True)
def instances(monkeypatch):
    """Return the environment instances that a test creates; shorten the retry delay."""
    monkeypatch.setattr(collector, "FIRST_PAUSE", 0.01)
    Echo.made = []
    return Echo.made


# Instances


class Busy(AsyncEcho):
    """An environment that counts its concurrent instances."""

    playing = most = 0

    async def reset(self, scenario):
        Busy.playing += 1
        Busy.most = max(Busy.most, Busy.playing)
        return await super().reset(scenario)

    async def step(self, action):
        step = await super().step(action)
        Busy.playing -= step.done
        return step


@pytest.mark.parametrize("said_by", ["collect.environments", "the environment"])
def test_episodes_wait_for_an_instance(instances, said_by):
    Busy.playing = Busy.most = 0
    kind = Busy if said_by == "collect.environments" else type("Few", (Busy,), {"instances": 2})
    trajectories = collect(
        Parrot(seconds=0.002),
        EnvironmentPool(kind),
        scenarios(6),
        environments=2 if kind is Busy else None,
        group_size=4,
        concurrency=12,
    )
    assert Busy.most == 2
    assert len(instances) == 2
    assert all(instance.closed for instance in instances)
    assert repr(trajectories) == repr(collect(Parrot(), Echo, scenarios(6), group_size=4))


def test_waiting_for_an_instance_is_not_the_episodes_time():
    trajectories = collect(Parrot(seconds=0.1), AsyncEcho, scenarios(4), concurrency=8, environments=1, timeout=1.3)
    assert [trajectory.failure for trajectory in trajectories] == [None] * 8  # each takes 0.2 s, all together 1.6


def test_an_instance_is_good_for_so_many_episodes(instances):
    class Leaky(Echo):
        good_for = 3

    collect(Parrot(), Leaky, scenarios(4), concurrency=1)
    assert len(instances) == 3  # 3 + 3 + 2
    assert all(instance.closed for instance in instances)


def test_an_instance_that_failed_is_not_lent_again(instances):
    class Fragile(Echo):
        def reset(self, scenario):
            assert not self.closed
            if scenario.id == "s1":
                raise KeyError("lost its mind")
            return super().reset(scenario)

    collect(Parrot(), Fragile, scenarios(3), concurrency=1)
    assert len(instances) == 3  # s0 twice and s1 once, s1 again, s2 twice
    assert [instance.closed for instance in instances] == [True] * 3


def test_instances_that_outlast_a_loop_stay_from_stage_to_stage(instances):
    class Heavy(Echo):
        lasting = True

    pool = EnvironmentPool(Heavy)
    for _ in range(2):
        collect(Parrot(), pool, scenarios(3), concurrency=2)
    assert len(instances) <= 2
    assert not any(instance.closed for instance in instances)
    pool.close()
    assert all(instance.closed for instance in instances)


def test_instances_of_a_factory_do_not_outlast_the_collection(instances):
    class Heavy(Echo):
        lasting = True

    collect(Parrot(), Heavy, scenarios(3), concurrency=2)
    assert [instance.closed for instance in instances] == [True] * len(instances)


def test_who_gives_up_waiting_does_not_take_an_instance_along():
    async def scene():
        pool = EnvironmentPool(Echo, 1)

        async def play(seconds):
            async with pool.lease() as lease:
                await asyncio.sleep(seconds)
                lease.reusable = True

        first, second, third = (asyncio.create_task(play(0.02)) for _ in range(3))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.wait_for(asyncio.gather(first, third), 600)
        await asyncio.wait_for(play(0.0), 600)  # the place is free again
        await pool.end_stage()

    asyncio.run(scene())


def test_an_agent_that_wants_no_environment_gets_none(instances):
    engine = Parrot()

    def agent(base_url, api_key):
        ask(base_url, api_key, [user("x")])

    with endpoint(engine, agent) as (own, _, _):
        collect(engine, Echo, scenarios(2), player=Player(own))
    assert instances == []


# Time


@pytest.mark.parametrize(("place", "what"), [("reset", "reset"), ("step", "step 1")])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_step_that_takes_too_long_fails_its_episode(instances, place, what, blocking):
    class Stuck(Echo):
        pass

    returned, ended = threading.Event(), []

    def wait(self, *_):
        returned.wait()
        ended.append("wait")

    async def sleep(self, *_):
        await asyncio.Event().wait()

    Stuck.blocking = blocking
    setattr(Stuck, place, wait if blocking else sleep)
    (trajectory,) = collect(Parrot(), Stuck, scenarios(1), group_size=1, step_timeout=0.1)
    assert ended == []
    returned.set()
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("environment", "WaitTimeout")
    assert trajectory.failure.message == f"{what} took longer than 0.1 s (step_timeout of this stage)"


@pytest.mark.parametrize("place", ["reset", "step"])
def test_a_plain_step_that_took_too_long_fails_its_episode_when_it_has_ended(instances, place):
    class Slow(Echo):
        pass

    def wait(self, *arguments):
        time.sleep(0.3)
        return getattr(Echo, place)(self, *arguments)

    setattr(Slow, place, wait)
    (trajectory,) = collect(Parrot(), Slow, scenarios(1), group_size=1, step_timeout=0.1)
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("environment", "WaitTimeout")
    assert "took longer than 0.1 s (step_timeout of this stage)" in trajectory.failure.message
    (trajectory,) = collect(Parrot(), Slow, scenarios(1), group_size=1, step_timeout=30.0)
    assert trajectory.failure is None


def test_the_limit_of_a_step_is_not_that_of_the_engine():
    (trajectory,) = collect(Parrot(seconds=0.9), AsyncEcho, scenarios(1), group_size=1, step_timeout=0.6)
    assert trajectory.failure is None


def test_cancelled_episodes_are_nobodys_failure_and_close_their_environments(instances):
    """Cancellation while one episode waits for the engine and the others for an instance."""
    recorded = []

    async def episode(pool, scenario):
        async with pool.lease() as lease:
            recorded.append(
                await play(
                    Parrot(seconds=300), lease.environment, scenario, sample=0, sampling=Sampling(), max_turns=2, seed=0
                )
            )

    async def interrupted():
        task, pool = asyncio.current_task(), EnvironmentPool(Echo, 1)
        asyncio.get_running_loop().call_later(0.1, task.cancel)
        try:
            await asyncio.gather(*(episode(pool, scenario) for scenario in scenarios(4)))
        finally:
            async with asyncio.timeout(60), pool.lease():
                pass  # nobody holds the place any more

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert recorded == []
    assert [instance.closed for instance in instances] == [True, True]


# Tries


class Shaky(Echo):
    """An environment that is unreachable at the first `away` resets of a scenario, and once during a step."""

    resets: dict = {}
    away = 1

    def reset(self, scenario):
        count = Shaky.resets[scenario.id] = Shaky.resets.get(scenario.id, 0) + 1
        self.breaks = count == self.away + 1
        if count <= self.away:
            raise ConnectionRefusedError(111, "Connection refused")
        return super().reset(scenario)

    def step(self, action):
        if self.breaks and self.said:
            raise EnvironmentUnavailable("HTTP 503")
        return super().step(action)


def test_an_episode_whose_environment_was_away_is_played_again_and_is_the_same(instances):
    Shaky.resets = {}
    recorded = []
    trajectories = collect(Parrot(), Shaky, scenarios(3), group_size=1, retries=2, on_retry=recorded.append)
    assert len(recorded) == 6  # twice for each scenario
    assert {type(error) for error in recorded} == {EnvironmentUnavailable}
    expected = collect(Parrot(), Echo, scenarios(3), group_size=1)
    assert repr(trajectories) == repr(expected)
    assert all(instance.closed for instance in instances)


def test_when_it_stays_away_the_last_try_is_the_failure():
    Shaky.resets = {}
    (trajectory,) = collect(Parrot(), Shaky, scenarios(1), group_size=1, retries=1)
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("environment", "EnvironmentUnavailable")
    assert trajectory.failure.message == "HTTP 503"
    assert [message.role for message in trajectory.histories[0].messages] == ["user", "assistant", "user", "assistant"]


class Built:
    """Return a factory that fails with `error` at the given builds. Instances serve one episode."""

    def __init__(self, error, *at):
        self.error, self.at, self.count = error, at, 0

    def __call__(self):
        self.count += 1
        if self.count in self.at:
            raise self.error
        return type("Short", (Echo,), {"good_for": 1})()


def test_an_environment_that_cannot_be_built_while_it_is_away_is_built_again():
    recorded = []
    make = Built(ConnectionRefusedError(111, "Connection refused"), 2, 3)
    trajectories = collect(
        Parrot(), make, scenarios(3), group_size=1, concurrency=1, retries=2, on_retry=recorded.append
    )
    texts = [str(error).partition(" (tests/")[0] for error in recorded]
    assert texts == ["build: ConnectionRefusedError: [Errno 111] Connection refused"] * 2
    assert repr(trajectories) == repr(collect(Parrot(), Echo, scenarios(3), group_size=1))


@pytest.mark.parametrize(
    ("error", "kind", "builds"),
    [(ConnectionResetError("reset"), "EnvironmentUnavailable", 5), (KeyError("bug"), "EnvironmentFailed", 3)],
)
def test_an_environment_that_is_not_built_fails_its_episode_only(error, kind, builds):
    make = Built(error, *range(2, 2 + builds - 2))
    trajectories = collect(Parrot(), make, scenarios(3), group_size=1, concurrency=1, retries=2)
    assert [trajectory.failure and trajectory.failure.kind for trajectory in trajectories] == [None, kind, None]
    assert trajectories[1].failure.boundary == "environment"
    assert trajectories[1].failure.message.startswith(f"build: {type(error).__name__}: {error} (tests/rollout/")
    assert (trajectories[1].scenario.id, trajectories[1].policy, trajectories[1].metrics["turns"]) == (
        "s1",
        "base",
        0.0,
    )
    assert make.count == builds
    with pytest.raises(TooManyFailures, match=r"1 of 3 episodes failed.*s1/0"):
        collect(Parrot(), Built(error, 2, 3, 4), scenarios(3), group_size=1, concurrency=1, retries=2, max_failures=0)


@pytest.mark.parametrize(
    "error", [SpecError([Problem("environment.size", "is 0; expected at least 1")]), ResourceError("pip install it")]
)
def test_a_mistake_that_shows_when_an_environment_is_built_ends_the_collection(error):
    make = Built(error, 2)
    with pytest.raises(type(error), match=r"is 0; expected at least 1|pip install it"):
        collect(Parrot(), make, scenarios(3), group_size=1, concurrency=1, retries=2)
    assert make.count == 2


def test_what_does_not_pass_is_not_played_again(instances):
    errors, recorded = [KeyError("bug"), EnvironmentFailed("broken"), ValueError("HTTP 500")], []
    for error in errors:

        def fail(error=error):
            raise error

        (trajectory,) = collect(
            Parrot(), lambda: Echo(step=fail), scenarios(1), group_size=1, retries=5, on_retry=recorded.append
        )
        assert trajectory.failure.kind == "EnvironmentFailed"
    assert recorded == []
    assert len(instances) == len(errors)


def test_an_agent_that_failed_is_not_played_again():
    """Transient errors that the agent itself raises are not retried."""
    played = []

    def agent(scenario):
        played.append(scenario.id)
        raise ConnectionRefusedError("its own server")

    engine = Parrot()
    with endpoint(engine, agent) as (own, _, _):
        (trajectory,) = collect(engine, Echo, scenarios(1), group_size=1, player=Player(own), retries=3)
    assert (trajectory.failure.boundary, played) == ("agent", ["s0"])


def http_status(code):
    request = httpx.Request("POST", "http://there/step")
    return httpx.HTTPStatusError("x", request=request, response=httpx.Response(code, request=request))


def wrapped(cause):
    try:
        raise RuntimeError("the step failed") from cause
    except RuntimeError as error:
        return error


def test_what_passes():
    limited = urllib.error.HTTPError("u", 429, "slow down", None, None)
    passing = [
        ConnectionResetError(),
        wrapped(BrokenPipeError()),
        urllib.error.URLError(ConnectionRefusedError()),
        ExceptionGroup("all", [OSError(), ConnectionRefusedError()]),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
        http_status(503),
        wrapped(http_status(502)),
        limited,
    ]
    lasting = [
        httpx.ReadTimeout("slow"),
        http_status(500),
        http_status(404),
        FileNotFoundError(),
        SystemExit(503),
        None,
    ]
    lasting.append(wrapped(KeyError(503)))
    assert [error for error in passing if not passes(error)] == []
    assert [error for error in lasting if passes(error)] == []
    limited.close()


def test_a_real_line_that_nobody_listens_at_passes():
    with pytest.raises(httpx.ConnectError) as caught:
        httpx.post("http://127.0.0.1:9/step", timeout=5, trust_env=False)
    assert passes(caught.value)


# Failures that are allowed


def test_so_many_may_fail():
    """max_failures is an inclusive share below 1, a count from 1."""
    allowed = {
        (0, 100): 0,
        (0.29, 100): 29,  # in floating point 28.999…
        (0.1, 10): 1,
        (0.1, 9): 0,
        (0.999, 10): 9,
        (1, 100): 1,
        (1.0, 1): 1,
        (2.5, 100): 2,
        (7, 3): 3,
        (float("inf"), 3): 3,
        (0.5, 0): 0,
    }
    assert {case: failures_allowed(*case) for case in allowed} == allowed


# Limits of context, turns and calls


class Eager(Echo):
    """An environment that reports success before its end."""

    def step(self, action):
        step = super().step(action)
        step.info["success"] = True
        return step


def overflow(*_):
    raise ContextOverflow("the prompt has 4,096 tokens")


def second_prompt_of_odd_scenarios(request):
    if len(request.messages) > 1 and int(request.messages[0]["content"][4:-1]) % 2:
        overflow()


def only(trajectory, limit):
    return [name for name in LIMITS if name in trajectory.metrics] == [limit]


def test_episodes_that_outgrow_the_context_count_as_unsuccessful_in_every_mean():
    trajectories = collect(
        Parrot(fail=second_prompt_of_odd_scenarios), Eager, scenarios(16), group_size=1, max_failures=0
    )
    ended = trajectories[1]
    assert (ended.failure, ended.success, ended.metrics["turns"], ended.step_rewards) == (None, False, 1.0, [0.5])
    assert [score.reward for score in Outcome().score_group([ended])] == [0.0]
    assert only(ended, CONTEXT)
    assert [message.role for message in ended.histories[0].messages] == ["user", "assistant", "user"]
    summary = summarise(trajectories)
    assert summary["success"] | {"low": 0, "high": 0} == {"mean": 8 / 16, "low": 0, "high": 0, "n": 16}
    assert (summary["failures"]["count"], summary["truncated"]) == (0, {CONTEXT: 8})
    metrics = figures(trajectories)
    assert (metrics["failed"], metrics["success"], metrics[CONTEXT]) == (0.0, 0.5, 0.5)
    assert limit_texts(metrics) == {
        CONTEXT: (0.5, "8 of 16 episodes by the limit of context, without success; raise model.max_length")
    }
    assert [is_truncated(trajectory) for trajectory in trajectories[:2]] == [False, True]
    assert pass_at_k(trajectories, 1)["pass_at_k"]["n"] == 16


def test_an_episode_whose_first_prompt_does_not_fit_has_no_turns():
    (trajectory,) = collect(Parrot(fail=overflow), Echo, scenarios(1), group_size=1)
    assert (trajectory.failure, trajectory.metrics["turns"], trajectory.success) == (None, 0.0, False)
    assert only(trajectory, CONTEXT)


@pytest.mark.parametrize("environment", [Echo, Eager])
def test_an_episode_that_uses_up_its_turns_is_truncated(environment):
    (trajectory,) = collect(Parrot(), environment, scenarios(1), group_size=1, max_turns=1)
    assert (trajectory.failure, trajectory.success) == (None, False)
    assert trajectory.histories[0].messages[-1].content == "Again."
    assert only(trajectory, TURNS)


def test_an_episode_that_ends_in_its_last_turn_is_not_truncated():
    (trajectory,) = collect(Parrot(), Echo, scenarios(1), group_size=1, max_turns=2)
    assert trajectory.success
    assert not is_truncated(trajectory)


def goes_on(base_url, api_key):
    while True:
        ask(base_url, api_key, [user("more")])


def handles(base_url, api_key):
    try:
        goes_on(base_url, api_key)
    except urllib.error.HTTPError:
        return {"success": True}


def fourth_call():
    calls = iter(range(10))
    return lambda _: next(calls) >= 3 and overflow()


@pytest.mark.parametrize(
    ("agent", "fail", "limit", "success"),
    [
        (goes_on, fourth_call, CONTEXT, False),
        (goes_on, lambda: None, CALLS, False),
        (handles, fourth_call, CONTEXT, True),
        (handles, lambda: None, CALLS, True),
    ],
)
def test_a_custom_agent_at_a_limit_is_truncated_unless_it_returns_a_result(agent, fail, limit, success):
    engine = Parrot(fail=fail())
    with endpoint(engine, agent) as (own, _, _):
        (trajectory,) = collect(engine, Echo, scenarios(1), group_size=1, max_turns=5, player=Player(own))
    assert (trajectory.failure, trajectory.success) == (None, success)
    assert trajectory.metrics["turns"] == (3.0 if limit == CONTEXT else 5.0)
    assert is_truncated(trajectory) is not success
    assert success or only(trajectory, limit)


def test_the_console_names_the_limits_that_shaped_a_stage():
    metrics = {"episodes": 8.0, "failed": 2.0, "turns": 4.0, CONTEXT: 1 / 3, TURNS: 1 / 6, MESSAGES: 2.0}
    artifact = SimpleNamespace(stage="evaluate", metrics=metrics, path=None)
    assert list(episode_failures.lines("evaluate[start]", SimpleNamespace(stage="train", metrics=metrics))) == []
    assert episode_failures.limits_of(artifact)[MESSAGES][0] == 0.5
    artifact.metrics = metrics | {"failed": 0.0, "episodes": 6.0}
    assert list(episode_failures.lines("evaluate[start]", artifact)) == [
        "  evaluate[start] truncated: 2 of 6 episodes by the limit of context, without success; raise model.max_length",
        "  evaluate[start] truncated: 1 of 6 episodes by the limit of turns, without success; raise agent.max_turns",
        "  evaluate[start] truncated: 50.0% of the answers were cut off; raise agent.max_tokens",
    ]


class CutOff(Parrot):
    """Begins a call of a tool that the limit of tokens cuts off, twice; then an unreadable one that it does not."""

    async def chat(self, request):
        completion = await super().chat(request)
        message = {"role": "assistant", "content": "<tool_call>"}
        return replace(completion, message=message, finish_reason="length" if len(self.requests) < 3 else "stop")


def test_the_model_is_told_that_its_answer_was_cut_off():
    (trajectory,) = collect(CutOff(), Echo, scenarios(1), group_size=1, max_turns=4)
    read = [message.content for message in trajectory.histories[-1].messages if message.role == "user"][1:]
    assert read[:2] == ["error: your answer was cut off because it is too long; write a shorter one"] * 2
    assert ["cut off" in text for text in read] == [True, True, False, False]
    assert (trajectory.metrics["truncated"], trajectory.metrics["parse_errors"]) == (2.0, 4.0)


def test_sampled_tokens_without_a_prompt_fail_the_episode():
    class Promptless(Parrot):
        async def chat(self, request):
            return replace(await super().chat(request), prompt_token_ids=[])

    (trajectory,) = collect(Promptless(), Echo, scenarios(1), group_size=1)
    assert trajectory.failure.boundary == "engine"
    assert "without those of their prompt" in trajectory.failure.message
