"""The agent loop.

The model is shown the conversation, the action that its answer stands for (`formats`) goes to the environment, the
observation is appended; until the environment is done, or the turns are used up. A truncated answer is an action like
any other: the environment says what it thinks of it.

What an engine or an environment raises, and what an environment says that is no message, ends the episode as a failure
with the name of its boundary. Only two things pass through: cancellation, which is nobody's failure, and a user's
mistake (SpecError, ResourceError), which would fail every episode alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from typing import Any, get_args

from components.aio import in_thread
from components.environments.protocol import Environment, Messages, Players, Step
from components.errors import (
    BoundaryError,
    EngineError,
    EnvironmentAway,
    EnvironmentFailed,
    Problem,
    ResourceError,
    SpecError,
    WaitTimeout,
)
from components.exceptions import passes
from components.inference.protocol import ChatRequest, Engine, Sampling
from components.rollout import formats
from components.rollout.observations import cleaned
from components.rollout.recorder import Recorder
from components.rollout.tool_schemas import as_tools
from components.sandbox import Limits
from components.trajectories.convert import to_message
from components.trajectories.schema import Failure, Role, Scenario, Trajectory

MAX_OBSERVATION = 100_000
"""Characters of one message of an environment, where nobody says otherwise."""


async def play(
    engine: Engine,
    environment: Environment,
    scenario: Scenario,
    *,
    sample: int,
    sampling: Sampling,
    max_turns: int,
    seed: int,
    timeout: float | None = None,
    step_timeout: float | None = None,
    format: formats.Name = "native",
    limits: Limits | None = None,
    max_observation: int = MAX_OBSERVATION,
    again: bool = False,
) -> Trajectory:
    """Plays one episode with the policy that the engine holds.

    timeout: seconds that it may take. step_timeout: seconds that the environment may take each time it is asked. A
    failure of engine or environment, and running out of time, is recorded in the trajectory, with what was said until
    then; cancellation passes through. format: how actions are written. limits: of code that the agent writes (format
    `code`).
    max_observation: most characters of one message of the environment; the rest is cut, and the message says so.
    again: raise EnvironmentAway, for the episode to be played again, in place of recording it.
    """
    shown: dict[str, Any] = {"format": format, "limits": limits, "max_observation": max_observation}
    episode = Episode(engine, environment, sampling, seed, **shown)
    async with episode.within(timeout, step_timeout, again):
        await episode.begin(scenario)
        while not episode.done and episode.talk.turns < max_turns:
            await episode.turn()
    return episode.trajectory(scenario, sample)


class Talk:
    """A conversation with the policy that the engine holds when it begins; what is sampled is recorded. seed: of its
    answers."""

    def __init__(self, engine: Engine, sampling: Sampling, seed: int, agent: str = "main"):
        self.engine = engine
        self.policy = engine.policy
        self.sampling = sampling
        self.seed = seed
        self.messages: Messages = []
        self.tools: list[dict[str, Any]] = []
        self.recorder = Recorder(agent)
        self.turns = self.sampled = self.truncated = 0

    async def answer(self) -> dict[str, Any]:
        """What the policy says next. Raises EngineError and its kin."""
        seed = self.seed * 1009 + self.turns
        request = ChatRequest(list(self.messages), self.tools, self.policy, self.sampling, seed=seed)
        completion = await ask(self.engine.chat, request, error=EngineError)
        self.recorder.record(self.messages, completion)
        self.messages.append(completion.message)
        self.turns, self.sampled = self.turns + 1, self.sampled + len(completion.token_ids)
        self.truncated += completion.finish_reason == "length"
        return completion.message

    def branch(self, seed: int) -> Talk:
        """The same conversation, to go on differently; what was said until here was not sampled in it."""
        other = Talk(self.engine, self.sampling, seed, self.recorder.agent)
        other.policy, other.tools, other.turns = self.policy, self.tools, self.turns
        other.messages = list(self.messages)
        return other


class Episode:
    """An episode under way: the conversation, the environment, and what has come of them."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        sampling: Sampling,
        seed: int,
        *,
        format: formats.Name = "native",
        limits: Limits | None = None,
        max_observation: int = MAX_OBSERVATION,
        agent: str = "main",
    ):
        self.talk = Talk(engine, sampling, seed, agent)
        self.environment = environment
        self.first: Messages = []
        """What the environment said first."""
        self.steps: list[tuple[dict[str, Any], Step]] = []
        """Actions, and what the environment said to each."""
        self.rewards: list[float] = []
        """One for each answer."""
        self.outcome: dict[str, Any] = {}
        self.done = False
        self.failure: Failure | None = None
        self._shown = formats.make(format, limits)
        self._most = max_observation
        self._unread = self._cut = 0
        self.awaited: type[BoundaryError] = EnvironmentFailed
        """The boundary that is waited for."""
        self._step_timeout: float | None = None

    @contextlib.asynccontextmanager
    async def within(
        self, timeout: float | None, step_timeout: float | None = None, again: bool = False
    ) -> AsyncIterator[None]:
        """What fails inside, and running out of the seconds `timeout`, ends the episode as a failure. step_timeout:
        seconds for what `world` asks. again: EnvironmentAway passes through."""
        self._step_timeout = step_timeout
        try:
            async with asyncio.timeout(timeout):
                yield
        except BoundaryError as error:
            if again and isinstance(error, EnvironmentAway):
                raise
            self.failure = Failure(error.boundary, type(error).__name__, str(error))
        except WaitTimeout as error:
            self.failure = Failure(EnvironmentFailed.boundary, type(error).__name__, str(error))
        except TimeoutError:
            text = (
                f"the episode took longer than {timeout:g} s (timeout of this stage), last it waited for the "
                f"{self.awaited.boundary}"
            )
            self.failure = Failure(self.awaited.boundary, "WaitTimeout", text)

    async def world(self, what: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Asks the environment for something. Raises WaitTimeout where it takes longer than a step may: at that
        moment, or after it where a plain method holds everything up meanwhile."""
        limit, began = self._step_timeout, time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                answer = await ask(method, *arguments)
                if limit is None or time.monotonic() - began <= limit:
                    return answer
        raise WaitTimeout(f"{what} took longer than {limit:g} s (step_timeout of this stage)")

    async def start(self, scenario: Scenario) -> tuple[Messages, formats.Tools]:
        """Resets the environment; what it says first, and its tools."""
        tools = as_tools(await self.world("tools", self.environment.tools))
        return as_messages(await self.world("reset", self.environment.reset, scenario), "reset"), tools

    async def step(self, action: dict[str, Any]) -> Step:
        """A step of the environment."""
        step = as_step(await self.world(f"step {len(self.steps) + 1}", self.environment.step, action))
        self.steps.append((action, step))
        return step

    async def begin(self, scenario: Scenario) -> None:
        """Resets the environment, and shows what it says first."""
        self.open(*await self.start(scenario))
        if isinstance(self.environment, Players) and len(self.environment.players) > 1:
            names = " and ".join(self.environment.players)
            raise SpecError([Problem("environment", f"wants {names} played; expected collect.opponent=policy or base")])

    def open(self, first: Messages, tools: formats.Tools) -> None:
        """What is shown first."""
        self.first = first
        shown, self._cut = cleaned(first, self._most)
        opening, self.talk.tools = self._shown.opening(shown, tools)
        self.talk.messages += opening

    async def turn(self) -> None:
        """One answer, and what the environment makes of it."""
        answer = await self.answer()
        try:
            step = await self._shown.act(answer, self._take)
        except formats.Unreadable as error:
            self._misread(error)
            return
        self.rewards.append(step.reward)
        self.done = step.done
        self.talk.messages += step.observation

    async def decide(self) -> dict[str, Any] | None:
        """The action that the policy's next answer stands for, where a message is one; None where it cannot be read,
        which it is told."""
        assert isinstance(self._shown, formats.OneAction)
        answer = await self.answer()
        try:
            return self._shown.read(answer)
        except formats.Unreadable as error:
            self._misread(error)
            return None

    async def answer(self) -> dict[str, Any]:
        """The policy's next answer, as it is."""
        self.awaited = EngineError
        answer = await self.talk.answer()
        self.awaited = EnvironmentFailed
        return answer

    async def _take(self, action: dict[str, Any]) -> Step:
        step = await self.step(action)
        self.outcome = step.info
        shown, cut = cleaned(step.observation, self._most)
        self._cut += cut
        return replace(step, observation=shown)

    def _misread(self, error: formats.Unreadable) -> None:
        self._unread += 1
        self.rewards.append(0.0)
        self.talk.messages.append({"role": "user", "content": f"{self._shown.mark}error: {error}"})

    def see(self, step: Step) -> None:
        """What came of an action that `decide` gave."""
        self.rewards.append(step.reward)
        self.outcome = step.info
        self.done = step.done
        self.hear(step.observation)

    def hear(self, observation: Messages) -> None:
        """What the environment says, after its first words, where a message is one action."""
        assert isinstance(self._shown, formats.OneAction)
        shown, cut = cleaned(observation, self._most)
        self._cut += cut
        self.talk.messages += self._shown.show(shown)

    def branch(self, seed: int) -> Episode:
        """The same episode, to go on differently in an environment that is put where this one is."""
        other = copy.copy(self)
        other.talk, other._shown = self.talk.branch(seed), copy.copy(self._shown)
        other.steps, other.rewards = list(self.steps), list(self.rewards)
        return other

    def trajectory(self, scenario: Scenario, sample: int) -> Trajectory:
        """The episode as it stands."""
        talk = self.talk
        talk.recorder.close(talk.messages)
        return Trajectory(
            id=f"{scenario.id}/{sample}",
            scenario=scenario,
            sample=sample,
            histories=talk.recorder.histories,
            tools=talk.tools,
            step_rewards=self.rewards,
            outcome=self.outcome,
            metrics={
                "turns": float(talk.turns),
                "sampled_tokens": float(talk.sampled),
                "truncated": float(talk.truncated),
                "parse_errors": float(self._unread),
                **{name: float(count) for name, count in self._shown.counts.items()},
                **({"cut_observations": float(self._cut)} if self._cut else {}),
            },
            failure=self.failure,
            policy=talk.policy,
            sampling={**asdict(talk.sampling), "seed": talk.seed},
        )


async def ask(method: Callable[..., Any], *arguments: Any, error: type[BoundaryError] = EnvironmentFailed) -> Any:
    """Calls a method, plain or async; what it raises becomes `error`, and EnvironmentAway where that may pass. Plain
    methods of an environment that says that they take long (`blocking`) run in a thread."""
    name = getattr(method, "__name__", str(method))
    try:
        if getattr(getattr(method, "__self__", None), "blocking", False) and not inspect.iscoroutinefunction(method):
            answer = await in_thread(lambda: method(*arguments))
        else:
            answer = method(*arguments)
        return await answer if inspect.isawaitable(answer) else answer
    except (BoundaryError, SpecError, ResourceError):
        raise
    except asyncio.CancelledError as cause:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise error(f"{name}: cancelled itself") from cause  # nobody asked for it: the other side broke
    except (Exception, SystemExit) as cause:  # an environment that exits must not take the run along
        kind = EnvironmentAway if error is EnvironmentFailed and passes(cause) else error
        raise kind(f"{name}: {type(cause).__name__}: {cause}") from cause


def as_messages(found: Any, where: str) -> Messages:
    """What an environment said, if these are messages; else EnvironmentFailed."""
    if not isinstance(found, list | tuple):
        raise EnvironmentFailed(f"{where} returned {type(found).__name__}, expected a list of messages")
    for message in found:
        try:
            said = to_message(message)
        except (KeyError, TypeError, AttributeError):
            said = None
        if said is None or said.role not in get_args(Role) or not isinstance(said.content, str):
            raise EnvironmentFailed(
                f"{where} returned {message!r:.200} for a message; expected a mapping with a role "
                f"({', '.join(get_args(Role))}) and text as content"
            )
    return list(found)


def as_step(step: Any) -> Step:
    """What `step` returned, if it keeps the protocol; else EnvironmentFailed."""
    if not isinstance(step, Step):
        raise EnvironmentFailed(f"step returned {type(step).__name__}, expected Step")
    given: Any = step.reward
    try:
        reward = math.nan if isinstance(given, str) else float(given)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise EnvironmentFailed(f"step returned the reward {given!r:.200}, expected a finite number")
    if not isinstance(step.info, dict):
        raise EnvironmentFailed(f"step returned the info {step.info!r:.200}, expected a mapping")
    info = as_json(step.info, "step (info)")
    if (success := info.get("success", False)) not in (True, False):
        raise EnvironmentFailed(f"step returned the info success={success!r:.200}, expected true or false")
    return Step(as_messages(step.observation, "step"), reward, bool(step.done), info)


def as_json(data: Any, where: str) -> Any:
    """The data, if they can be stored; else EnvironmentFailed."""
    try:
        json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"{where} returned what is no JSON data: {error}") from None
    return data
