"""Tests of the live view: correct counts, one complete episode, and no effect of errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from components.environments.protocol import Step
from components.rollout import live_view
from components.rollout.agent import AgentLoop
from components.rollout.live_view import LiveProgress, environment_reward
from components.rollout.players.reflection import ReflectionPlayer, ReflectionSpec
from flows.history.live_view import as_text
from tests.rollout.worlds import AsyncEcho, Echo, Parrot, collect, scenarios


@pytest.fixture
def updates():
    return []


def make(tmp_path, updates, **options):
    return LiveProgress(
        {"stage": "collect", "what": "collect, round 1"},
        8,
        lambda done, total, values: updates.append((done, total, dict(values))),
        tmp_path / live_view.FILE,
        **options,
    )


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / live_view.FILE).read_text().splitlines()]


def play(view, engine, environment, **options):
    hear = {"on_begin": view.begins, "on_episode": lambda trajectory, seconds: view.ended(trajectory)}
    return collect(engine, environment, scenarios(4), **hear, **options)


def test_one_episode_is_shown_from_its_first_message_to_its_end(tmp_path, updates):
    heard = []
    view = make(tmp_path, updates, listen=heard.append)
    played = play(view, Parrot(), AsyncEcho, concurrency=1)
    first, *events = lines(tmp_path)
    assert (first["stage"], first["what"], first["total"]) == ("collect", "collect, round 1", 8)
    assert events == heard
    messages = played[0].histories[0].messages
    shown = events[: len(messages) + 2]
    assert shown[0] == {"episode": "s0/0"}
    assert [(event["role"], event["content"]) for event in shown[1:-1]] == [
        (message.role, message.content) for message in messages
    ]
    assert [event.get("sampled") for event in shown[1:-1]] == [
        None,
        len(messages[1].content),
        None,
        len(messages[3].content),
    ]
    assert shown[-1] == {"ended": "s0/0", "reward": 1.0, "success": True, "failure": None}
    assert [event["episode"] for event in events if "episode" in event] == [
        trajectory.id for trajectory in played
    ]  # one after the other
    view.close()
    assert not (tmp_path / live_view.FILE).exists()


class Lost(Echo):
    """Environment without success, whose second attempt is shorter than the first."""

    tries = 0

    def reset(self, scenario):
        Lost.tries += 1
        return super().reset(scenario)

    def step(self, action):
        step = super().step(action)
        return Step(step.observation, step.reward, step.done or Lost.tries % 2 == 0, {"success": False})


def test_what_belongs_to_a_shown_episode_is_told_after_its_end_and_nothing_is_shown_twice(tmp_path, updates):
    view = make(tmp_path, updates)
    jobs = {f"s{n}/{k}" for n in range(4) for k in range(2)}
    hear = {
        "on_begin": view.begins,
        "on_episode": lambda trajectory, seconds: (
            view.ended(trajectory) if trajectory.id in jobs else view.follows(trajectory)
        ),
    }
    player = ReflectionPlayer(AgentLoop(), ReflectionSpec(max_tokens=8))
    played = collect(Parrot(), Lost, scenarios(4), **hear, player=player, concurrency=1)
    events = lines(tmp_path)[1:]
    shown = events[: next(place for place, event in enumerate(events) if event.get("episode") == "s0/1")]
    second = next(trajectory for trajectory in played if trajectory.id == "s0~second/0")
    assert [("ended" in event, "followed" in event) for event in shown[-2:]] == [(True, False), (False, True)]
    assert shown[-1] == {
        "followed": "s0~second/0",
        "reward": environment_reward(second),
        "success": False,
        "failure": None,
    }
    messages = [(event["role"], event["content"]) for event in shown if event.get("role") == "assistant"]
    first = next(trajectory for trajectory in played if trajectory.id == "s0/0")
    updates = [
        message.content
        for trajectory in (first, second)
        for history in trajectory.histories
        for message in history.messages
    ]
    assert [text for _, text in messages] == [text for text in updates if text.isdecimal()]


def test_of_many_at_once_one_is_shown_and_all_are_counted(tmp_path, updates, monkeypatch):
    monkeypatch.setattr(live_view, "EVERY", 0)

    def fail(request):
        if "Say 3" in request.messages[0]["content"]:
            raise RuntimeError("broken")

    view = make(tmp_path, updates)
    play(view, Parrot(seconds=0.01, fail=fail), AsyncEcho, concurrency=8, max_failures=2)
    assert max(values["running"] for *_, values in updates) == 8
    done, total, values = updates[-1]
    assert (done, total) == (8, 8)
    assert (values["running"], values["failed"], values["reward"]) == (0, 2, 1.0)
    assert values["tokens_per_s"] > 0
    begun = [line["episode"] for line in lines(tmp_path) if "episode" in line]
    assert begun[0] == "s0/0"
    assert len(begun) < 8  # the others were under way by then
    assert [done for done, *_ in updates] == sorted(done for done, *_ in updates)


def test_no_reward_is_shown_where_the_environment_gives_none(tmp_path, updates):
    class Unrewarded(Echo):
        def step(self, action):
            return replace(super().step(action), reward=0.0)

    play(make(tmp_path, updates), Parrot(), Unrewarded)
    assert updates[-1][0] == 8
    assert not any("reward" in values for *_, values in updates)
    (shown, *_) = [line for line in lines(tmp_path) if "ended" in line]
    assert shown["reward"] is None
    assert as_text(shown) == f"── ended: {'success' if shown['success'] else 'no success'}"


def test_a_failed_episode_says_why_and_earlier_ones_count(tmp_path, updates):
    def fail(request):
        raise RuntimeError("the engine is away")

    earlier = play(make(tmp_path / "..", updates), Parrot(), Echo)[:2]
    updates.clear()
    view = make(tmp_path, updates, finished=earlier)
    assert updates == [(2, 8, {"running": 0.0, "failed": 0.0, "reward": 1.0})]
    play(view, Parrot(fail=fail), Echo, finished={trajectory.id: trajectory for trajectory in earlier}, max_failures=9)
    ended = [line for line in lines(tmp_path) if "ended" in line]
    assert ended[0]["failure"].startswith("EngineError: chat: RuntimeError: the engine is away")
    assert updates[-1][:2] == (8, 8)


def test_long_texts_are_cut_and_the_file_begins_anew(tmp_path, updates, monkeypatch):
    monkeypatch.setattr(live_view, "MOST_BYTES", 12_000)
    long = lambda: Step([{"role": "user", "content": "x" * 50_000}], 0.5, False, {})  # noqa: E731
    view = make(tmp_path, updates)
    play(view, Parrot(), lambda: Echo(step=long), concurrency=1, max_turns=2)
    assert (tmp_path / live_view.FILE).stat().st_size < 12_000 + 3 * live_view.LONGEST
    first, *events = lines(tmp_path)
    assert first["total"] == 8
    assert "episode" in events[0]
    assert events[3]["content"] == "x" * live_view.LONGEST + "… (46000 characters more)"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": "none"},
        {"role": "assistant", "content": [{"type": "text"}], "tool_calls": [None, {"function": 3}]},
        {"content": 5},
    ],
)
def test_whatever_an_agent_sends_is_shown_somehow(message):
    assert json.dumps(live_view._message(message))


def test_a_disk_that_is_full_ends_the_file_and_nothing_else(tmp_path, updates):
    (tmp_path / live_view.FILE).mkdir()  # cannot be written to
    played = play(make(tmp_path, updates), Parrot(), Echo)
    assert [trajectory.failure for trajectory in played] == [None] * 8
    assert updates[-1][:2] == (8, 8)
