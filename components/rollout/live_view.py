"""What goes on while episodes are played, for people: counts as they change, and one episode as it happens.

A `Live` is told of each episode that begins and ends, and hears what is said to the engine in between. One episode at a
time is watched, from its first message to its end; then the next one that begins. What it says is written to a file of
JSON lines, which other processes may follow. Nothing that is played depends on it, and a disk that is full ends the
file, not the episodes.
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
"""Its name in the folder of an unfinished stage."""
LONGEST = 4000
"""Characters of one text that are shown; the rest is counted."""
MOST_CALLS = 16
"""Tool calls of one message that are shown."""
MOST_BYTES = 1_000_000
"""Size from which the file begins anew with the next episode."""
EVERY = 0.2
"""Seconds between two words about counts while no episode ends."""

Event = Mapping[str, Any]
"""`{"episode": name}` where one begins to be watched; `{"role", "content", "calls", "sampled"}` of a message, where
`sampled` are its tokens, if the policy said it; `{"ended": name, "reward", "success", "failure"}`, and the same with
`followed` for what was played after it and belongs to it: a second attempt, the other player's side, a teacher's."""
Tell = Callable[[int, int, Mapping[str, float]], None]
"""Told how many of how many episodes are done, with figures: `running`, `failed`, `tokens_per_s`, and the mean `reward`
of those that ended well: what the environment gave, before any judge."""


class Live:
    """what: is played, for the file's first line. total: episodes of all. finished: those of earlier tries. listen:
    hears the events, too."""

    def __init__(
        self,
        what: Mapping[str, Any],
        total: int,
        tell: Tell,
        file: Path,
        finished: Iterable[Trajectory] = (),
        listen: Callable[[Event], None] | None = None,
    ):
        self._what = {**what, "total": total, "begun": time.time()}
        self._total = total
        self._tell = tell
        self._file: Path | None = file
        self._listen = listen
        self._lock = threading.RLock()
        self._start = self._told = time.monotonic()
        self._done: set[str] = set()
        self._failed = self._tokens = 0
        self._size = 0
        self._rewards = 0.0
        self._running: set[str] = set()
        self._watched: str | None = None
        self._followed = False
        """Whether the episode that ended last was the one that is watched."""
        self._shown: list[dict[str, Any]] = []
        for one in finished:
            self._count(one)
        self._begin_file()
        self._say_counts()

    def begins(self, name: str, engine: Engine) -> Engine:
        """An episode begins, or begins again; the engine that it is to be played with."""
        with self._lock:
            self._running.add(name)
            if self._watched in (None, name):
                self._watched, self._shown = name, []
                if self._file is not None and self._size > MOST_BYTES:
                    self._begin_file()
                self._event({"episode": name})
        return _Heard(engine, name, self)

    def said(self, name: str, messages: list[dict[str, Any]], completion: ChatCompletion) -> None:
        """The engine has answered these messages of an episode."""
        with self._lock:
            self._tokens += len(completion.token_ids)
            if name == self._watched:
                self._show(messages)
                self._event(_message(completion.message) | {"sampled": len(completion.token_ids)})
                self._shown = [*messages, completion.message]
            if time.monotonic() - self._told > EVERY:
                self._say_counts()

    def ended(self, trajectory: Trajectory) -> None:
        """An episode has ended, well or not."""
        with self._lock:
            self._running.discard(trajectory.id)
            self._count(trajectory)
            self._followed = trajectory.id == self._watched
            if self._followed:
                said = trajectory.histories[-1].messages if trajectory.histories else []
                end = [{"role": one.role, "content": one.content} for one in said]
                if self._goes_on(end):  # else something else was said since, such as a second attempt
                    self._show(end)
                self._event({"ended": trajectory.id, **_outcome(trajectory)})
                self._watched = None
            self._say_counts()

    def follows(self, trajectory: Trajectory) -> None:
        """What belongs to the episode that ended last, and is none of those that are counted."""
        with self._lock:
            if self._followed:
                self._event({"followed": trajectory.id, **_outcome(trajectory)})

    def close(self) -> None:
        """Removes the file: nobody plays any more."""
        with self._lock, contextlib.suppress(OSError):
            file, self._file = self._file, None
            if file is not None:
                file.unlink(missing_ok=True)

    def _count(self, trajectory: Trajectory) -> None:
        if trajectory.id in self._done:
            return  # of an earlier try, and played again for what follows from it
        self._done.add(trajectory.id)
        if trajectory.failure is not None:
            self._failed += 1
        else:
            self._rewards += given(trajectory)

    def _say_counts(self) -> None:
        self._told = time.monotonic()
        values = {"running": float(len(self._running)), "failed": float(self._failed)}
        if (well := len(self._done) - self._failed) > 0:
            values["reward"] = self._rewards / well
        if self._tokens:
            values["tokens_per_s"] = self._tokens / (self._told - self._start)
        self._tell(len(self._done), self._total, values)

    def _show(self, messages: list[dict[str, Any]]) -> None:
        """Those that come after what was shown; all of them, where the conversation is another one."""
        for one in messages[len(self._shown) if self._goes_on(messages) else 0 :]:
            self._event(_message(one))

    def _goes_on(self, messages: list[dict[str, Any]]) -> bool:
        """Whether they begin with what was shown. An agent may write its calls, and what is empty, in another way."""
        return [_core(one) for one in messages[: len(self._shown)]] == [_core(one) for one in self._shown]

    def _event(self, event: Event) -> None:
        if self._listen is not None:
            self._listen(event)
        if self._file is not None:
            self._write(event, "a")

    def _begin_file(self) -> None:
        self._write(self._what, "w")

    def _write(self, line: Event, mode: str) -> None:
        try:
            assert self._file is not None
            with self._file.open(mode, encoding="utf-8", errors="replace") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                self._size = file.tell()
        except OSError:
            self.close()


class _Heard:
    """The engine of one episode."""

    def __init__(self, engine: Engine, name: str, live: Live):
        self._engine = engine
        self._name = name
        self._live = live

    @property
    def policy(self) -> str:
        return self._engine.policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        completion = await self._engine.chat(request)
        self._live.said(self._name, request.messages, completion)
        return completion

    def load_policy(self, version: str, folder: str | None) -> None:
        self._engine.load_policy(version, folder)

    def close(self) -> None:
        self._engine.close()


def given(trajectory: Trajectory) -> float:
    """The reward that the environment or the agent gave: that of the outcome, else the sum of the steps'."""
    stated = trajectory.outcome.get("reward")
    if isinstance(stated, int | float) and not isinstance(stated, bool):
        return float(stated)
    return float(sum(trajectory.step_rewards))


def _outcome(trajectory: Trajectory) -> dict[str, Any]:
    failure = trajectory.failure
    return {
        "reward": given(trajectory),
        "success": trajectory.success,
        "failure": _cut(f"{failure.kind}: {failure.message}") if failure else None,
    }


def _core(message: Mapping[str, Any]) -> tuple[str, str]:
    return str(message.get("role")), str(message.get("content") or "")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """As it is shown; an agent of one's own may have sent anything."""
    calls = message.get("tool_calls")
    found: dict[str, Any] = {"role": str(message.get("role")), "content": _cut(str(message.get("content") or ""))}
    if isinstance(calls, list) and calls:
        found["calls"] = [_call(one) for one in calls[:MOST_CALLS]]
        found["more_calls"] = max(len(calls) - MOST_CALLS, 0)
    return found


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return _cut(str(call))
    return _cut(f"{function.get('name')} {function.get('arguments')}")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST} characters more)"
