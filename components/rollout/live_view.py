"""Live progress of running episodes: counts, and the messages of one episode at a time.

A `LiveProgress` is notified of the start and end of each episode and of the engine's responses in between. It follows
one episode from its first message to its end, then the next one that begins. Events are written to a JSON lines file
that other processes may follow. Episodes do not depend on it: a write error, such as a full disk, ends the file only.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from components.inference.protocol import ChatCompletion, ChatRequest, Engine
from components.trajectories.schema import Trajectory

FILE = "live.jsonl"
"""File name in the folder of an unfinished stage."""
LONGEST = 4000
"""Maximum number of characters per text; the number of omitted characters is stated."""
MOST_CALLS = 16
"""Maximum number of tool calls shown per message."""
MOST_BYTES = 1_000_000
"""File size in bytes from which the next episode overwrites the file."""
EVERY = 0.2
"""Seconds between progress updates while no episode ends."""

Event = Mapping[str, Any]
"""An event: `{"episode": name}` at the start of the followed episode; `{"role", "content", "reasoning", "calls",
"sampled"}` for a message, where `sampled` is the number of its tokens if the policy sampled it; `{"ended": name,
"reward", "success", "failure"}` at the end, and the same with `followed` for derived episodes: a second attempt, the
other player's side, or a teacher's. `reward` is null where the environment gives none."""
Tell = Callable[[int, int, Mapping[str, float]], None]
"""Progress callback: finished episodes, total episodes, and the values `running`, `failed`, `tokens_per_s` and, if the
environment gives rewards of its own, the mean `reward` of episodes without failure."""


class LiveProgress:
    """Progress of a stage's episodes. what: description of the stage for the file's first line. total: number of
    episodes. tell: progress callback. finished: episodes of earlier attempts of the stage. listen: event callback."""

    def __init__(
        self,
        collection: Mapping[str, Any],
        total: int,
        tell: Tell,
        file: Path,
        finished: Iterable[Trajectory] = (),
        listen: Callable[[Event], None] | None = None,
    ):
        self._collection = {**collection, "total": total, "begun": time.time()}
        self._total = total
        self._tell = tell
        self._file: Path | None = file
        self._listen = listen
        self._lock = threading.RLock()
        self._start = self._last_update = time.monotonic()
        self._done: set[str] = set()
        self._failed = self._tokens = 0
        self._size = 0
        self._rewards = 0.0
        self._rewarded = False
        """True if the environment has given a reward of its own."""
        self._running: set[str] = set()
        self._watched: str | None = None
        self._followed = False
        """True if the episode that ended last was the watched one."""
        self._shown: list[dict[str, Any]] = []
        for trajectory in finished:
            self._count(trajectory)
        self._begin_file()
        self._update()

    def begins(self, name: str, engine: Engine) -> Engine:
        """Record the start or retry of an episode; return the engine to play it with."""
        with self._lock:
            self._running.add(name)
            if self._watched in (None, name):
                self._watched, self._shown = name, []
                if self._file is not None and self._size > MOST_BYTES:
                    self._begin_file()
                self._event({"episode": name})
        return _ObservedEngine(engine, name, self)

    def record_response(self, name: str, messages: list[dict[str, Any]], completion: ChatCompletion) -> None:
        """Record the engine's response to the messages of an episode."""
        with self._lock:
            self._tokens += completion.sampled_tokens
            if name == self._watched:
                self._show(messages)
                self._event(_message(completion.message) | {"sampled": completion.sampled_tokens})
                self._shown = [*messages, completion.message]
            if time.monotonic() - self._last_update > EVERY:
                self._update()

    def ended(self, trajectory: Trajectory) -> None:
        """Record the end of an episode, with or without failure."""
        with self._lock:
            self._running.discard(trajectory.id)
            self._count(trajectory)
            self._followed = trajectory.id == self._watched
            if self._followed:
                last = trajectory.histories[-1].messages if trajectory.histories else []
                end = [{"role": message.role, "content": message.content} for message in last]
                if self._extends_shown(end):  # otherwise another conversation began, such as a second attempt
                    self._show(end)
                self._event({"ended": trajectory.id, **_outcome(trajectory)})
                self._watched = None
            self._update()

    def follows(self, trajectory: Trajectory) -> None:
        """Record an episode derived from the one that ended last. Derived episodes are not counted."""
        with self._lock:
            if self._followed:
                self._event({"followed": trajectory.id, **_outcome(trajectory)})

    def close(self) -> None:
        """Remove the file at the end of the stage."""
        with self._lock, contextlib.suppress(OSError):
            file, self._file = self._file, None
            if file is not None:
                file.unlink(missing_ok=True)

    def _count(self, trajectory: Trajectory) -> None:
        if trajectory.id in self._done:
            return  # finished in an earlier attempt, replayed for the episodes derived from it
        self._done.add(trajectory.id)
        if trajectory.failure is not None:
            self._failed += 1
        else:
            reward = environment_reward(trajectory)
            self._rewarded |= reward is not None
            self._rewards += reward or 0.0

    def _update(self) -> None:
        self._last_update = time.monotonic()
        values = {"running": float(len(self._running)), "failed": float(self._failed)}
        completed = len(self._done) - self._failed
        if self._rewarded and completed:
            values["reward"] = self._rewards / completed
        if self._tokens:
            values["tokens_per_s"] = self._tokens / (self._last_update - self._start)
        self._tell(len(self._done), self._total, values)

    def _show(self, messages: list[dict[str, Any]]) -> None:
        """Emit the messages after the shown ones, or all messages of a different conversation."""
        for message in messages[len(self._shown) if self._extends_shown(messages) else 0 :]:
            self._event(_message(message))

    def _extends_shown(self, messages: list[dict[str, Any]]) -> bool:
        """Return True if the messages begin with the shown ones, by role and text. Agents may change the form of calls
        and of empty text."""
        start = messages[: len(self._shown)]
        return [_core(message) for message in start] == [_core(message) for message in self._shown]

    def _event(self, event: Event) -> None:
        if self._listen is not None:
            self._listen(event)
        if self._file is not None:
            self._write(event, "a")

    def _begin_file(self) -> None:
        self._write(self._collection, "w")

    def _write(self, line: Event, mode: str) -> None:
        try:
            assert self._file is not None
            with self._file.open(mode, encoding="utf-8", errors="replace") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                self._size = file.tell()
        except OSError:
            self.close()


class _ObservedEngine:
    """The engine of one episode, which reports responses to a `LiveProgress`."""

    def __init__(self, engine: Engine, name: str, live: LiveProgress):
        self._engine = engine
        self._name = name
        self._live = live
        self.count_tokens = getattr(engine, "count_tokens", None)

    @property
    def policy(self) -> str:
        return self._engine.policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        completion = await self._engine.chat(request)
        self._live.record_response(self._name, request.messages, completion)
        return completion


def environment_reward(trajectory: Trajectory) -> float | None:
    """Return the reward of the environment or the agent: the outcome's reward, else the sum of step rewards; None if
    there is neither. All step rewards of an environment without rewards of its own are 0."""
    stated = trajectory.outcome.get("reward")
    if isinstance(stated, int | float) and not isinstance(stated, bool):
        return float(stated)
    return float(sum(trajectory.step_rewards)) if any(trajectory.step_rewards) else None


def _outcome(trajectory: Trajectory) -> dict[str, Any]:
    failure = trajectory.failure
    return {
        "reward": environment_reward(trajectory),
        "success": trajectory.success,
        "failure": _cut(f"{failure.kind}: {failure.message}") if failure else None,
    }


def _core(message: Mapping[str, Any]) -> tuple[str, str]:
    return str(message.get("role")), str(message.get("content") or "")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event of a message. Messages of custom agents are not validated."""
    calls = message.get("tool_calls")
    event: dict[str, Any] = {"role": str(message.get("role")), "content": _cut(str(message.get("content") or ""))}
    if reasoning := message.get("reasoning"):
        event["reasoning"] = _cut(str(reasoning))
    if isinstance(calls, list) and calls:
        event["calls"] = [_call(call) for call in calls[:MOST_CALLS]]
        event["more_calls"] = max(len(calls) - MOST_CALLS, 0)
    return event


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return _cut(str(call))
    return _cut(f"{function.get('name')} {function.get('arguments')}")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST} characters more)"
