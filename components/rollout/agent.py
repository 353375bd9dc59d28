"""The agent loop.

Each turn, the model reads the conversation, its response is parsed into an action (`formats`), the environment executes
the action, and the observation is appended. The loop ends when the environment is done or the turns are used up. A
truncated response is an action like any other.

An exception of the engine or the environment, or an observation that violates the protocol, ends the episode as a
failure that names its boundary. Two kinds of exceptions propagate: cancellation, and user errors (SpecError,
ResourceError), which would fail every episode.
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
"""Default maximum number of characters per environment message."""


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
    raise_unreachable: bool = False,
) -> Trajectory:
    """Play one episode with the engine's loaded policy and return its trajectory.

    A failure of the engine or the environment, or a timeout, is recorded in the trajectory together with the
    conversation so far; cancellation propagates.

    timeout: time limit of the episode in seconds. step_timeout: time limit of each environment call in seconds. format:
    action format. limits: resource limits of the agent's code (format `code`). max_observation: maximum number of
    characters per environment message; longer messages are truncated and marked. raise_unreachable: raise
    EnvironmentAway instead of recording it, so that the caller can retry the episode.
    """
    shown: dict[str, Any] = {"format": format, "limits": limits, "max_observation": max_observation}
    episode = Episode(engine, environment, sampling, seed, **shown)
    async with episode.within(timeout, step_timeout, raise_unreachable):
        await episode.begin(scenario)
        while not episode.done and episode.talk.turns < max_turns:
            await episode.turn()
    return episode.trajectory(scenario, sample)


class Talk:
    """A conversation with the policy that the engine has loaded at its start. Sampled tokens are recorded. seed:
    sampling seed of the responses."""

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
        """Sample and return the policy's next message. Raises EngineError and its subclasses."""
        seed = self.seed * 1009 + self.turns
        request = ChatRequest(list(self.messages), self.tools, self.policy, self.sampling, seed=seed)
        completion = await ask(self.engine.chat, request, error=EngineError)
        self.recorder.record(self.messages, completion)
        self.messages.append(completion.message)
        self.turns, self.sampled = self.turns + 1, self.sampled + len(completion.token_ids)
        self.truncated += completion.finish_reason == "length"
        return completion.message

    def branch(self, seed: int) -> Talk:
        """Return a copy of the conversation to continue with another seed. The messages so far count as unsampled in
        it."""
        branch = Talk(self.engine, self.sampling, seed, self.recorder.agent)
        branch.policy, branch.tools, branch.turns = self.policy, self.tools, self.turns
        branch.messages = list(self.messages)
        return branch


class Episode:
    """A running episode: conversation, environment, rewards and outcome."""

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
        """Initial messages of the environment."""
        self.steps: list[tuple[dict[str, Any], Step]] = []
        """Actions with the environment's step results."""
        self.rewards: list[float] = []
        """Reward of each response."""
        self.outcome: dict[str, Any] = {}
        self.done = False
        self.failure: Failure | None = None
        self._format = formats.make(format, limits)
        self._max_observation = max_observation
        self._parse_errors = self._truncated_observations = 0
        self.awaited: type[BoundaryError] = EnvironmentFailed
        """Boundary that the episode is waiting for."""
        self._step_timeout: float | None = None

    @contextlib.asynccontextmanager
    async def within(
        self, timeout: float | None, step_timeout: float | None = None, raise_unreachable: bool = False
    ) -> AsyncIterator[None]:
        """Record boundary errors and timeouts of the block as the episode's failure. timeout: time limit of the block
        in seconds. step_timeout: time limit of each call by `world` in seconds. raise_unreachable: propagate
        EnvironmentAway."""
        self._step_timeout = step_timeout
        try:
            async with asyncio.timeout(timeout):
                yield
        except BoundaryError as error:
            if raise_unreachable and isinstance(error, EnvironmentAway):
                raise
            self.failure = Failure(error.boundary, type(error).__name__, str(error))
        except WaitTimeout as error:
            self.failure = Failure(EnvironmentFailed.boundary, type(error).__name__, str(error))
        except TimeoutError:
            text = (
                f"the episode took longer than {timeout:g} s (timeout of this stage) while it waited for the "
                f"{self.awaited.boundary}"
            )
            self.failure = Failure(self.awaited.boundary, "WaitTimeout", text)

    async def world(self, operation: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the environment and return its result. Raises WaitTimeout if it exceeds the step timeout: at
        once, or afterwards if a synchronous method blocks the event loop. operation: name for messages."""
        limit, start = self._step_timeout, time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                answer = await ask(method, *arguments)
                if limit is None or time.monotonic() - start <= limit:
                    return answer
        raise WaitTimeout(f"{operation} took longer than {limit:g} s (step_timeout of this stage)")

    async def start(self, scenario: Scenario) -> tuple[Messages, formats.Tools]:
        """Reset the environment and return its initial messages and its tools."""
        tools = as_tools(await self.world("tools", self.environment.tools))
        return as_messages(await self.world("reset", self.environment.reset, scenario), "reset"), tools

    async def step(self, action: dict[str, Any]) -> Step:
        """Execute an action in the environment and return the step."""
        step = as_step(await self.world(f"step {len(self.steps) + 1}", self.environment.step, action))
        self.steps.append((action, step))
        return step

    async def begin(self, scenario: Scenario) -> None:
        """Reset the environment and show its initial messages to the agent. Raises SpecError for two-player games."""
        self.open(*await self.start(scenario))
        if isinstance(self.environment, Players) and len(self.environment.players) > 1:
            names = " and ".join(self.environment.players)
            raise SpecError([Problem("environment", f"wants {names} played; expected collect.opponent=policy or base")])

    def open(self, first: Messages, tools: formats.Tools) -> None:
        """Show the initial messages and the tools to the agent."""
        self.first = first
        shown, self._truncated_observations = cleaned(first, self._max_observation)
        opening, self.talk.tools = self._format.opening(shown, tools)
        self.talk.messages += opening

    async def turn(self) -> None:
        """Sample one response and execute it in the environment."""
        answer = await self.answer()
        try:
            step = await self._format.act(answer, self._execute)
        except formats.Unreadable as error:
            self._record_parse_error(error)
            return
        self.rewards.append(step.reward)
        self.done = step.done
        self.talk.messages += step.observation

    async def decide(self) -> dict[str, Any] | None:
        """Sample a response and return its action, in a format with one action per message. If it cannot be parsed,
        show the error to the policy and return None."""
        assert isinstance(self._format, formats.OneAction)
        answer = await self.answer()
        try:
            return self._format.read(answer)
        except formats.Unreadable as error:
            self._record_parse_error(error)
            return None

    async def answer(self) -> dict[str, Any]:
        """Sample and return the policy's next message, unparsed."""
        self.awaited = EngineError
        answer = await self.talk.answer()
        self.awaited = EnvironmentFailed
        return answer

    async def _execute(self, action: dict[str, Any]) -> Step:
        step = await self.step(action)
        self.outcome = step.info
        shown, truncated = cleaned(step.observation, self._max_observation)
        self._truncated_observations += truncated
        return replace(step, observation=shown)

    def _record_parse_error(self, error: formats.Unreadable) -> None:
        self._parse_errors += 1
        self.rewards.append(0.0)
        self.talk.messages.append({"role": "user", "content": f"{self._format.mark}error: {error}"})

    def see(self, step: Step) -> None:
        """Record the step result of an action from `decide` and show its observation to the agent."""
        self.rewards.append(step.reward)
        self.outcome = step.info
        self.done = step.done
        self.hear(step.observation)

    def hear(self, observation: Messages) -> None:
        """Show an observation to the agent, in a format with one action per message."""
        assert isinstance(self._format, formats.OneAction)
        shown, truncated = cleaned(observation, self._max_observation)
        self._truncated_observations += truncated
        self.talk.messages += self._format.show(shown)

    def branch(self, seed: int) -> Episode:
        """Return a copy of the episode to continue with another seed, in an environment restored to this state."""
        branch = copy.copy(self)
        branch.talk, branch._format = self.talk.branch(seed), copy.copy(self._format)
        branch.steps, branch.rewards = list(self.steps), list(self.rewards)
        return branch

    def trajectory(self, scenario: Scenario, sample: int) -> Trajectory:
        """Return the trajectory of the episode so far."""
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
                "parse_errors": float(self._parse_errors),
                **{name: float(count) for name, count in self._format.counts.items()},
                **({"cut_observations": float(self._truncated_observations)} if self._truncated_observations else {}),
            },
            failure=self.failure,
            policy=talk.policy,
            sampling={**asdict(talk.sampling), "seed": talk.seed},
        )


async def ask(method: Callable[..., Any], *arguments: Any, error: type[BoundaryError] = EnvironmentFailed) -> Any:
    """Call a synchronous or async method and return its result. Its exceptions become `error`, or EnvironmentAway if
    they are transient. Synchronous methods of an environment with the attribute `blocking` run in a thread."""
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
        raise error(f"{name}: cancelled itself") from cause  # not requested by the caller: a failure of the method
    except (Exception, SystemExit) as cause:  # an environment that exits must not end the run
        kind = EnvironmentAway if error is EnvironmentFailed and passes(cause) else error
        raise kind(f"{name}: {type(cause).__name__}: {cause}") from cause


def as_messages(value: Any, where: str) -> Messages:
    """Return an environment's messages. Raises EnvironmentFailed if they violate the protocol."""
    if not isinstance(value, list | tuple):
        raise EnvironmentFailed(f"{where} returned {type(value).__name__}, expected a list of messages")
    for message in value:
        try:
            parsed = to_message(message)
        except (KeyError, TypeError, AttributeError):
            parsed = None
        if parsed is None or parsed.role not in get_args(Role) or not isinstance(parsed.content, str):
            raise EnvironmentFailed(
                f"{where} returned {message!r:.200} for a message; expected a mapping with a role "
                f"({', '.join(get_args(Role))}) and text as content"
            )
    return list(value)


def as_step(step: Any) -> Step:
    """Return the result of `step`. Raises EnvironmentFailed if it violates the protocol."""
    if not isinstance(step, Step):
        raise EnvironmentFailed(f"step returned {type(step).__name__}, expected Step")
    value: Any = step.reward
    try:
        reward = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise EnvironmentFailed(f"step returned the reward {value!r:.200}, expected a finite number")
    if not isinstance(step.info, dict):
        raise EnvironmentFailed(f"step returned the info {step.info!r:.200}, expected a mapping")
    info = as_json(step.info, "step (info)")
    if (success := info.get("success", False)) not in (True, False):
        raise EnvironmentFailed(f"step returned the info success={success!r:.200}, expected true or false")
    return Step(as_messages(step.observation, "step"), reward, bool(step.done), info)


def as_json(data: Any, where: str) -> Any:
    """Return the data. Raises EnvironmentFailed if they cannot be serialized as JSON."""
    try:
        json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"{where} returned data that cannot be serialized as JSON: {error}") from None
    return data
