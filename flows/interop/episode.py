"""Episodes of one environment instance, with the reward and the end that a program of others expects.

`ServedEpisode` runs on one event loop. `EpisodeThread` gives it a thread and a loop of its own: a slow step blocks no
other episode, and an environment whose resources belong to a thread or a loop (SQLite, sockets) works unchanged.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from components.environments.protocol import Environment, Messages
from components.errors import WaitTimeout
from components.rollout.agent import ask
from components.trajectories.schema import Scenario
from flows.interop.actions import InvalidRequest
from flows.interop.source import EpisodeReward, EpisodeSource
from flows.qualification.recording import Action, Recording, TestedInstance

Result = TypeVar("Result")

CLOSE = 10.0
"""Time limit to close an instance, in seconds."""


@dataclass(frozen=True)
class Start:
    """First messages and tools of an episode."""

    scenario: Scenario
    messages: Messages
    tools: list[dict[str, Any]]

    @property
    def text(self) -> str:
        """Return the messages as one text."""
        return _as_text(self.messages)


@dataclass(frozen=True)
class Transition:
    """Result of an action."""

    messages: Messages
    reward: float
    """Reward of this step; the rewards of an episode sum to its score."""
    terminated: bool
    """True if the environment ended the episode."""
    truncated: bool
    """True if the episode ended because it reached the maximum number of actions."""
    info: dict[str, Any] = field(default_factory=dict)
    """Outcome that the environment reports, with `success`."""
    new_context: bool = False
    """True if the messages begin a new conversation."""

    @property
    def done(self) -> bool:
        """True if the episode is over."""
        return self.terminated or self.truncated

    @property
    def text(self) -> str:
        """Return the messages as one text."""
        return _as_text(self.messages)


class ServedEpisode:
    """Episodes of one instance, one after the other."""

    def __init__(self, source: EpisodeSource, environment: Environment):
        self.source = source
        self._instance = TestedInstance(environment)
        self._served = 0
        self._reward = EpisodeReward(source.make_reward())
        self._recording: Recording | None = None
        self.steps, self.total, self.done = 0, 0.0, False

    async def reset(self, scenario: Scenario) -> Start:
        """Start an episode."""
        self._recording = None
        good_for = getattr(self._instance.environment, "good_for", None)
        if good_for is not None and self._served >= good_for:
            await self._instance.close()
            self._instance, self._served = TestedInstance(await ask(self.source.make)), 0
        self._served += 1
        recording = await self._instance.reset(scenario, "interop")
        self._recording, self.steps, self.total, self.done = recording, 0, 0.0, False
        return Start(scenario, recording.first, recording.tools)

    async def step(self, action: Action) -> Transition:
        """Execute an action. Raises InvalidRequest before the reset and after the end; JudgeError if the episode cannot
        be scored."""
        if self._recording is None:
            raise InvalidRequest("step before reset: reset the environment first")
        if self.done:
            raise InvalidRequest("step after the end of the episode: reset the environment to start another one")
        recording, self._recording = self._recording, None  # a step that fails ends the episode
        step = await self._instance.step(recording, action)
        self._recording = recording
        self.steps += 1
        truncated = not step.done and self.steps >= self.source.max_turns
        self.done = step.done or truncated
        reward = float(step.reward) if self._reward.of_steps else 0.0
        if self.done:
            reward = await self.score() - self.total
        self.total += reward
        return Transition(list(step.observation), reward, step.done, truncated, dict(step.info), step.new_context)

    async def score(self) -> float:
        """Return the score of the episode as if it ended now. Raises InvalidRequest before the reset."""
        if self._recording is None:
            raise InvalidRequest("score before reset: reset the environment first")
        trajectory = self._recording.trajectory()
        trajectory.metrics["turns"] = float(self.steps)
        return await self._reward.score(trajectory)

    async def close(self) -> None:
        """Close the instance."""
        self._recording = None
        await self._instance.close()


class EpisodeThread:
    """An episode in a thread with an event loop of its own."""

    def __init__(self, source: EpisodeSource):
        self._timeout = source.step_timeout
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=f"episode-{source.name}")
        self._thread.start()
        self._closed = False
        try:
            self.episode = self._submit(self._make(source)).result()
        except BaseException:
            self._stop()
            raise

    async def _make(self, source: EpisodeSource) -> ServedEpisode:
        return ServedEpisode(source, await ask(source.make))

    def call(self, work: Callable[[ServedEpisode], Coroutine[Any, Any, Result]]) -> Result:
        """Return the result of an operation on the episode. Raises WaitTimeout if it exceeds the step timeout."""
        future = self._submit(work(self.episode))
        try:
            return future.result(self._timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise self._timed_out() from None

    async def call_async(self, work: Callable[[ServedEpisode], Coroutine[Any, Any, Result]]) -> Result:
        """Return the same without blocking the caller's event loop."""
        future = self._submit(work(self.episode))
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise
            raise self._timed_out() from None

    def close(self) -> None:
        """Close the episode and end the thread. A thread that does not end within `CLOSE` seconds is abandoned."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self._submit(self.episode.close()).result(CLOSE)
        self._stop()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _timed_out(self) -> WaitTimeout:
        return WaitTimeout(f"the environment took longer than {self._timeout:g} s (collect.step_timeout)")

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE)
        if not self._thread.is_alive():
            self._loop.close()


def _as_text(messages: Messages) -> str:
    return "\n\n".join(str(message["content"]) for message in messages if message["content"])
