"""Tests of the collector: order of episodes, failures as data, no lost and no repeated episodes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import signal
import threading
import time
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.environments.protocol import Step
from components.errors import EngineError, ResourceError, SpecError, TooManyFailures, WaitTimeout
from components.rollout import collector, pool
from components.rollout.collector import choose_further, choose_scenarios, demonstrate
from components.rollout.formats import Presentation
from components.trajectories.schema import Scenario
from tests.rollout.worlds import AsyncEcho, Echo, Parrot, collect, play, scenarios

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def instances():
    """Return the environment instances that a test creates."""
    Echo.made = []
    return Echo.made


def raises(error: BaseException):
    def fail(*_):
        raise error

    return fail


def test_all_episodes_in_order():
    trajectories = collect(Parrot(), Echo, scenarios(3))
    assert [t.id for t in trajectories] == ["s0/0", "s0/1", "s1/0", "s1/1", "s2/0", "s2/1"]
    for trajectory in trajectories:
        assert trajectory.failure is None
        assert trajectory.success
        assert trajectory.step_rewards == [0.5, 0.5]
        assert trajectory.metrics["turns"] == 2
        (history,) = trajectory.histories
        assert [message.role for message in history.messages] == ["user", "assistant", "user", "assistant"]
        assert trajectory.outcome["said"] == [history.messages[1].content, history.messages[3].content]
        spoken = [history.token_ids[slice(*m.span)] for m in history.messages if m.span]
        assert ["".join(map(chr, ids)) for ids in spoken] == trajectory.outcome["said"]


def test_two_runs_are_equal_whatever_their_width():
    """Seeds are derived from names, so order and concurrency have no effect. (Compared by repr, as NaN != NaN.)"""
    runs = [
        repr(collect(Parrot(seconds=s), Echo, scenarios(4), concurrency=n)) for s, n in [(0, 1), (0.002, 3), (0, 64)]
    ]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0] != repr(collect(Parrot(), Echo, scenarios(4), seed=1))
    seeds = [t.sampling["seed"] for t in collect(Parrot(), Echo, scenarios(4))]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("place", ["tools", "reset", "step"])
@pytest.mark.parametrize("make", [Echo, AsyncEcho])
def test_an_environment_that_raises_is_data(place, make, instances):
    trajectories = collect(Parrot(), lambda: make(**{place: raises(KeyError("no such order"))}), scenarios(1))
    for trajectory in trajectories:
        failure = trajectory.failure
        assert (failure.boundary, failure.kind) == ("environment", "EnvironmentFailed")
        assert failure.message.startswith(f"{place}: KeyError: 'no such order'")
        assert not trajectory.success
    assert len(instances) == 2  # each episode after a failure has a new one
    assert all(environment.closed for environment in instances)
    roles = {"tools": [], "reset": [], "step": ["user", "assistant"]}[place]
    assert [message.role for message in trajectories[0].histories[0].messages] == roles


BAD = {
    "no step": ("step", lambda: {"observation": []}, "step returned dict, expected Step"),
    "no list": ("step", lambda: Step(None), "step returned NoneType, expected a list of messages"),
    "no message": ("step", lambda: Step(["Again."]), "step returned 'Again.' for a message"),
    "no role": ("reset", lambda: [{"content": "a"}], "reset returned {'content': 'a'} for a message"),
    "odd role": ("reset", lambda: [{"role": "robot", "content": "a"}], "expected a mapping with a role"),
    "no text": ("reset", lambda: [{"role": "user", "content": 7}], "text as content"),
    "no calls": ("reset", lambda: [{"role": "assistant", "content": "", "tool_calls": [{}]}], "for a message"),
    "no number": ("step", lambda: Step([], "much"), "step returned the reward 'much', expected a finite number"),
    "text for a number": ("step", lambda: Step([], "1"), "step returned the reward '1', expected a finite number"),
    "not finite": ("step", lambda: Step([], float("nan")), "step returned the reward nan, expected a finite number"),
    "infinite": ("step", lambda: Step([], -math.inf), "step returned the reward -inf, expected a finite number"),
    "NaN as JSON": (
        "step",
        lambda: Step([], info={"score": math.nan}),
        "step (info) returned data that cannot be serialized as JSON",
    ),
    "NaN as text": ("step", lambda: Step([{"role": "user", "content": math.nan}]), "text as content"),
    "half a success": ("step", lambda: Step([], info={"success": 0.5}), "success=0.5, expected true or false"),
    "success in words": ("step", lambda: Step([], info={"success": "no"}), "success='no', expected true or false"),
    "no mapping": ("step", lambda: Step([], info=[1]), "step returned the info [1], expected a mapping"),
    "no JSON": (
        "step",
        lambda: Step([], info={"at": object()}),
        "step (info) returned data that cannot be serialized as JSON",
    ),
    "no tools": ("tools", lambda: [object()], "tools returned data that cannot be serialized as JSON"),
    "own end": ("step", raises(asyncio.CancelledError()), "step: cancelled itself"),
    "own limit": ("step", raises(TimeoutError("socket")), "step: TimeoutError: socket"),
    "own exit": ("step", raises(SystemExit(3)), "step: SystemExit: 3"),
    "own wait": ("step", raises(WaitTimeout("waited 3 s")), "step: WaitTimeout: waited 3 s"),
}


def test_an_environment_that_breaks_the_protocol_is_data():
    for name, (place, answer, message) in BAD.items():
        for trajectory in collect(Parrot(), partial(Echo, **{place: answer}), scenarios(1)):
            assert trajectory.failure.boundary == "environment", name
            assert message in trajectory.failure.message, name
            assert (trajectory.reward, trajectory.step_rewards) == (None, []), name


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (EngineError("out of memory"), "EngineError", "out of memory"),
        (ConnectionError("refused"), "EngineError", "chat: ConnectionError: refused"),
        (TimeoutError("slow"), "EngineError", "chat: TimeoutError: slow"),
        (asyncio.CancelledError(), "EngineError", "chat: cancelled itself"),
    ],
)
def test_an_engine_that_raises_is_data(error, kind, message, instances):
    (trajectory, other) = collect(Parrot(fail=raises(error)), Echo, scenarios(1), concurrency=1)
    assert trajectory.failure == other.failure
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("engine", kind)
    assert trajectory.failure.message.startswith(message)
    assert trajectory.histories[0].messages[0].content == "Say 0."
    assert len(instances) == 1  # the environment did nothing wrong


@pytest.mark.parametrize("error", [SpecError([]), ResourceError("no weights")])
def test_a_mistake_of_the_user_ends_the_stage(error, instances):
    with pytest.raises(type(error)):
        collect(Parrot(), lambda: Echo(step=raises(error)), scenarios(3))
    assert all(environment.closed for environment in instances)


def some(count: int):
    """Return a callback that fails the first `count` requests."""
    left = [count]

    def fail(_):
        left[0] -= 1
        if left[0] >= 0:
            raise EngineError("overheated")

    return fail


@pytest.mark.parametrize(("max_failures", "allowed"), [(0.3, 2), (1, 1)])
def test_too_many_failures(max_failures, allowed):
    """max_failures of eight episodes: a share below 1, a count from 1."""
    trajectories = collect(Parrot(fail=some(allowed)), Echo, scenarios(4), max_failures=max_failures)
    assert sum(t.failure is not None for t in trajectories) == allowed
    recorded = []
    with pytest.raises(TooManyFailures) as caught:
        collect(
            Parrot(fail=some(allowed + 1)),
            Echo,
            scenarios(4),
            max_failures=max_failures,
            concurrency=1,
            on_episode=lambda trajectory, seconds: recorded.append(trajectory.id),
        )
    head = (
        f"{allowed + 1} of 8 episodes failed, more than the {allowed} that max_failures={max_failures:g} of this stage "
        "allows"
    )
    assert str(caught.value).startswith(head)
    assert f"{allowed + 1} EngineError (engine): s0/0: overheated" in str(caught.value)
    assert len(recorded) == allowed + 1  # it stopped there, and each was handed on


def test_an_episode_that_takes_too_long_keeps_what_was_said():
    class Slow(AsyncEcho):
        async def step(self, action):
            step = await super().step(action)
            if step.done:
                await asyncio.sleep(30)
            return step

    (trajectory, _) = collect(Parrot(), Slow, scenarios(1), timeout=0.2)
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("environment", "WaitTimeout")
    assert trajectory.failure.message == (
        "the episode took longer than 0.2 s (timeout of this stage) while it waited for the environment"
    )
    assert [m.role for m in trajectory.histories[0].messages] == ["user", "assistant", "user", "assistant"]
    assert trajectory.metrics["turns"] == 2
    (slow, _) = collect(Parrot(seconds=30), Echo, scenarios(1), timeout=0.05)
    assert (slow.failure.boundary, slow.failure.kind) == ("engine", "WaitTimeout")


def test_cancellation_is_nobodys_failure(instances):
    """Cancellation propagates, and no episode is reported."""
    recorded = []

    async def cancelled():
        task = asyncio.current_task()
        asyncio.get_running_loop().call_later(0.1, task.cancel)
        await play(Parrot(seconds=30), AsyncEcho(), scenarios(1)[0], sample=0, sampling=None, max_turns=2, seed=0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())

    def interrupt():
        while len(instances) < 4:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        collect(Parrot(seconds=30), AsyncEcho, scenarios(2), on_episode=lambda *a: recorded.append(a))
    thread.join()
    assert recorded == []
    assert all(environment.closed for environment in instances[1:])


def test_finished_episodes_are_not_played_again():
    first = collect(Parrot(), Echo, scenarios(3))
    engine, recorded = Parrot(), []
    finished = {t.id: t for t in first if t.id != "s1/1"}
    second = collect(engine, Echo, scenarios(3), finished=finished, on_episode=lambda t, seconds: recorded.append(t.id))
    assert recorded == ["s1/1"]
    assert len(engine.requests) == 2
    assert repr(second) == repr(first)
    assert all(a is b for a, b in zip(first, second, strict=True) if a.id != "s1/1")


def test_with_everything_finished_nothing_is_made(instances):
    first = collect(Parrot(), Echo, scenarios(2))
    instances.clear()
    assert collect(Parrot(), Echo, scenarios(2), finished={t.id: t for t in first}) == first
    assert instances == []


def test_finished_failures_count():
    first = collect(Parrot(fail=some(3)), Echo, scenarios(2))
    with pytest.raises(TooManyFailures, match="3 of 4 episodes failed"):
        collect(Parrot(), Echo, scenarios(2), finished={t.id: t for t in first}, max_failures=2)


def test_an_environment_that_does_not_close_costs_a_warning(caplog, monkeypatch):
    assert len(collect(Parrot(), lambda: Echo(close=raises(OSError("gone"))), scenarios(1), concurrency=1)) == 2
    assert [record.getMessage().partition(" (tests/")[0] for record in caplog.records] == [
        "an environment did not close: close: OSError: gone",
    ]
    caplog.clear()

    class Stuck(Echo):
        async def close(self):
            await asyncio.sleep(30)

    monkeypatch.setattr(pool, "CLOSE_TIMEOUT", 0.05)
    assert len(collect(Parrot(), Stuck, scenarios(1), concurrency=1)) == 2
    assert [record.getMessage() for record in caplog.records] == ["an environment did not close within 0.05 s"]


def test_equal_ids_are_refused():
    with pytest.raises(SpecError, match="same id to several scenarios"):
        collect(Parrot(), Echo, [*scenarios(2), *scenarios(1)])


def test_under_a_running_loop():
    """Run within a running event loop, as in a notebook."""

    async def cell():
        return collect(Parrot(), AsyncEcho, scenarios(2)), demonstrate(AsyncEcho, scenarios(2), Presentation())

    trajectories, shown = asyncio.run(cell())
    assert [t.failure for t in trajectories] == [None] * 4
    assert len(shown) == 2


# Demonstrations


def test_demonstrations():
    shown = demonstrate(AsyncEcho, scenarios(2), Presentation())
    assert [t.id for t in shown] == ["s0/0", "s1/0"]
    for trajectory in shown:
        assert trajectory.policy == "solver"
        assert trajectory.success
        assert trajectory.metrics == {"turns": 2.0}
        (history,) = trajectory.histories
        assert [m.content for m in history.messages if m.role == "assistant"] == ["one", "two"]
        assert history.token_ids == []
        assert all(message.span is None for message in history.messages)


def test_demonstrations_need_a_solver(instances):
    with pytest.raises(SpecError, match=r"Echo has no solve\(scenario\)"):
        demonstrate(Echo, scenarios(1), Presentation())


def test_a_demonstration_that_breaks_says_where(instances):
    with pytest.raises(collector.EnvironmentFailed, match="reset: KeyError: 'gone'"):
        demonstrate(lambda: AsyncEcho(reset=raises(KeyError("gone"))), scenarios(1), Presentation())
    assert instances[0].closed


# Scenarios of a round


@given(size=st.integers(1, 25), data=st.data(), rounds=st.integers(1, 12), seed=st.integers(0, 5))
def test_rounds_use_all_scenarios_before_any_comes_again(size, data, rounds, seed):
    count = data.draw(st.integers(1, size))
    available = scenarios(size)
    drawn = []
    for number in range(rounds):
        chosen = choose_scenarios(available, count, number, seed)
        assert len(chosen) == count
        assert len({scenario.id for scenario in chosen}) == count
        drawn += [scenario.id for scenario in chosen]
    for start in range(0, len(drawn), size):
        part = drawn[start : start + size]
        assert len(set(part)) == len(part)
        if len(part) == size:
            assert set(part) == {scenario.id for scenario in available}


@given(size=st.integers(4, 25), data=st.data(), number=st.integers(0, 5))
def test_further_scenarios_are_others(size, data, number):
    count = data.draw(st.integers(1, size // 2))
    available = scenarios(size)
    first = data.draw(st.integers(0, count))
    further = [
        *choose_further(available, count, number, 3, begin=0, more=first),
        *choose_further(available, count, number, 3, begin=first, more=count - first),
    ]
    round_ = choose_scenarios(available, count, number, 3)
    assert len({scenario.id for scenario in [*round_, *further]}) == 2 * count


def test_the_seed_orders_scenarios():
    orders = {tuple(scenario.id for scenario in choose_scenarios(scenarios(10), 10, 0, seed)) for seed in range(5)}
    assert len(orders) == 5
    again = [scenario.id for scenario in choose_scenarios(scenarios(10), 4, 3, 1)]
    assert again == [scenario.id for scenario in choose_scenarios(scenarios(10), 4, 3, 1)]


def test_every_round_has_its_share_of_each_type_and_difficulty():
    kinds = [("a", 1)] * 48 + [("a", 2)] * 12 + [("b", 1)] * 36
    available = [Scenario(f"s{i}", {}, "train", type=kind, difficulty=level) for i, (kind, level) in enumerate(kinds)]
    for seed, number in product(range(20), range(8)):
        chosen = choose_scenarios(available, 12, number, seed)
        for (kind, level), share in {("a", 1): 6, ("a", 2): 1.5, ("b", 1): 4.5}.items():
            came = sum((scenario.type, scenario.difficulty) == (kind, level) for scenario in chosen)
            assert abs(came - share) < 1 + 1e-9


def test_more_scenarios_than_there_are():
    with pytest.raises(SpecError, match=r"collect.scenarios: is 5, but the split has 4 scenarios"):
        choose_scenarios(scenarios(4), 5, 0, 0)


def test_run_episodes_takes_no_jobs():
    assert collect(Parrot(), Echo, []) == []


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_looked_for_seldom_while_episodes_are_played_and_as_before_afterwards(fails):
    before, thresholds = gc.get_threshold(), []

    class World(Echo):
        def reset(self, scenario):
            thresholds.append(gc.get_threshold()[0])
            if fails:
                raise SpecError([])
            return super().reset(scenario)

    with contextlib.suppress(SpecError):
        collect(Parrot(), World, scenarios(3))
    assert set(thresholds) == {collector.GC_THRESHOLD}
    assert gc.get_threshold() == before
