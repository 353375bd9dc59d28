"""The agent loop.

Each turn, the model reads the conversation, its response is parsed into an action (`formats`), the environment executes
the action, and the observation is appended, or begins a new conversation (`Step.new_context`). The loop ends when the
environment is done, the turns are used up, or the conversation does not fit the context: the latter two truncate the
episode (`components.trajectories.truncation`). A truncated response is an action like any other.

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
from dataclasses import replace
from typing import Any, TypeVarTuple, get_args

from components.aio import in_thread
from components.environments.protocol import Environment, Messages, Players, Step
from components.errors import (
    BoundaryError,
    ContextOverflow,
    EngineError,
    EnvironmentFailed,
    EnvironmentUnavailable,
    Problem,
    SpecError,
    WaitTimeout,
)
from components.exceptions import described, is_foreign, log_traceback, passes
from components.inference.protocol import ChatRequest, Engine
from components.rollout import formats
from components.rollout.action_format import is_invalid_call
from components.rollout.formats import Presentation
from components.rollout.observations import cleaned
from components.rollout.request import EpisodeRequest
from components.rollout.tool_schemas import as_tools
from components.rollout.usage import ReportedUsage
from components.trajectories.convert import to_message
from components.trajectories.recorder import Recorder
from components.trajectories.schema import Failure, Role, Trajectory
from components.trajectories.truncation import CONTEXT, MESSAGES, TURNS, truncated_at

Arguments = TypeVarTuple("Arguments")
CUT_OFF = "your answer was cut off because it is too long; write a shorter one"
"""Observation after a response without a valid action that was cut off."""


class AgentLoop:
    """An agent that the loop drives, in one conversation."""

    needs_environment = True
    holds_environment = False

    def __init__(self, presentation: Presentation | None = None):
        self.presentation = presentation or Presentation()

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> Trajectory:
        """Play one episode, as `players.player.Agent`. A failed episode keeps the conversation so far."""
        agent = self.presentation.agent(request.scenario)
        episode = Episode(engine, environment, request, self.presentation, agent)
        async with episode.within():
            await episode.begin()
            while not episode.ended:
                await episode.turn()
        return episode.trajectory()


class Conversation:
    """A conversation with the policy that the engine has loaded at its start. Sampled tokens are recorded."""

    def __init__(self, engine: Engine, request: EpisodeRequest, agent: str = "main"):
        self.engine = engine
        self.policy = engine.policy
        self.request = request
        self.messages: Messages = []
        self.tools: list[dict[str, Any]] = []
        self.recorder = Recorder(agent)
        self.turns = self.sampled = self.truncated = 0
        self.cut_off = False
        """True if the last response was cut off."""
        self.invalid_call = False
        """True if the last response is a call of a tool that cannot be read."""
        self.usage = ReportedUsage()

    async def answer(self) -> dict[str, Any]:
        """Sample and return the policy's next message. Raises EngineError and its subclasses."""
        seed = self.request.seed * 1009 + self.turns
        messages, agent = list(self.messages), self.recorder.agent
        request = ChatRequest(messages, self.tools, self.policy, self.request.sampling, seed=seed, agent=agent)
        completion = await ask(self.engine.chat, request, error=EngineError)
        self.recorder.record(self.messages, completion)
        self.messages.append(completion.message)
        self.turns, self.sampled = self.turns + 1, self.sampled + completion.sampled_tokens
        self.cut_off = completion.finish_reason == "length"
        self.truncated += self.cut_off
        self.invalid_call = is_invalid_call(completion, self.tools)
        self.usage.add(completion)
        return completion.message

    def branch(self, request: EpisodeRequest) -> Conversation:
        """Return a copy of the conversation that continues as another episode. The messages so far count as unsampled
        in it."""
        branch = Conversation(self.engine, request, self.recorder.agent)
        branch.policy, branch.tools, branch.turns = self.policy, self.tools, self.turns
        branch.messages = list(self.messages)
        return branch


class Episode:
    """A running episode: conversation, environment, rewards and outcome."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        request: EpisodeRequest,
        presentation: Presentation,
        agent: str = "main",
    ):
        self.talk = Conversation(engine, request, agent)
        self.environment = environment
        self.request = request
        self.first: Messages = []
        """Initial messages of the environment."""
        self.tools: formats.Tools = []
        """Tools of the environment."""
        self.steps: list[tuple[dict[str, Any], Step]] = []
        """Actions with the environment's step results."""
        self.rewards: list[float] = []
        """Reward of each response."""
        self.outcome: dict[str, Any] = {}
        self.done = False
        self.limit: str | None = None
        """Limit that ended the episode: the metric of `components.trajectories.truncation`."""
        self.failure: Failure | None = None
        self._format = formats.make(presentation.format, presentation.limits)
        self._max_observation = presentation.max_observation
        self._parse_errors = self._truncated_observations = 0
        self.awaited: type[BoundaryError] = EnvironmentFailed
        """Boundary that the episode is waiting for."""

    @property
    def ended(self) -> bool:
        """True if the environment is done or a limit is reached."""
        return self.done or self.limit is not None or self.talk.turns >= self.request.max_turns

    @contextlib.asynccontextmanager
    async def within(self) -> AsyncIterator[None]:
        """Limit the time of the block and record its boundary errors and timeouts as the episode's failure. A prompt
        that does not fit the context ends the block and truncates the episode."""
        timeout = self.request.timeout
        try:
            async with asyncio.timeout(timeout):
                yield
        except ContextOverflow:
            self.limit = CONTEXT
        except BoundaryError as error:
            if self.request.raise_unreachable and isinstance(error, EnvironmentUnavailable):
                raise
            self.failure = Failure.of(error, error.boundary)
        except WaitTimeout as error:
            self.failure = Failure.of(error, EnvironmentFailed.boundary)
        except TimeoutError:
            text = (
                f"the episode took longer than {timeout:g} s (timeout of this stage) while it waited for the "
                f"{self.awaited.boundary}"
            )
            self.failure = Failure(self.awaited.boundary, "WaitTimeout", text)

    async def world(self, operation: str, method: Callable[[*Arguments], Any], *arguments: *Arguments) -> Any:
        """Call a method of the environment and return its result. Raises WaitTimeout if it exceeds the step timeout: at
        once, or afterwards if a synchronous method blocks the event loop. operation: name for messages."""
        limit, start = self.request.step_timeout, time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                answer = await ask(method, *arguments)
                if limit is None or time.monotonic() - start <= limit:
                    return answer
        raise WaitTimeout(f"{operation} took longer than {limit:g} s (step_timeout of this stage)")

    async def start(self) -> tuple[Messages, formats.Tools]:
        """Reset the environment and return its initial messages and its tools."""
        first = as_messages(await self.world("reset", self.environment.reset, self.request.scenario), "reset")
        return first, as_tools(await self.world("tools", self.environment.tools))

    async def step(self, action: dict[str, Any]) -> Step:
        """Execute an action in the environment and return the step."""
        step = as_step(await self.world(f"step {len(self.steps) + 1}", self.environment.step, action))
        self.steps.append((action, step))
        return step

    async def begin(self) -> None:
        """Reset the environment and show its initial messages to the agent. Raises SpecError for two-player games."""
        self.open(*await self.start())
        if isinstance(self.environment, Players) and len(self.environment.players) > 1:
            names = " and ".join(self.environment.players)
            raise SpecError([Problem("environment", f"wants {names} played; expected collect.opponent=policy or base")])

    def open(self, first: Messages, tools: formats.Tools) -> None:
        """Show the initial messages and the tools to the agent."""
        self.first, self.tools = first, tools
        self._open_context(self._cleaned(first))

    def _open_context(self, messages: Messages) -> None:
        """Begin a conversation with these messages and the tools."""
        self.talk.messages, self.talk.tools = self._format.opening(messages, self.tools)

    async def turn(self) -> None:
        """Sample one response and execute it in the environment."""
        answer = await self.answer()
        try:
            self._require_readable()
            step = await self._format.act(answer, self._execute)
        except formats.UnparsedAction as error:
            self._record_parse_error(error)
            return
        self.rewards.append(step.reward)
        self.done = step.done
        if step.new_context:
            self._open_context(step.observation)
        else:
            self.talk.messages += step.observation

    async def decide(self) -> dict[str, Any] | None:
        """Sample a response and return its action, in a format with one action per message. If it cannot be parsed,
        show the error to the policy and return None."""
        assert isinstance(self._format, formats.SingleActionFormat)
        answer = await self.answer()
        try:
            self._require_readable()
            return self._format.read(answer)
        except formats.UnparsedAction as error:
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
        return replace(step, observation=self._cleaned(step.observation))

    def _require_readable(self) -> None:
        """Raise UnparsedAction if the last response is a call that cannot be read."""
        if self.talk.invalid_call:
            raise formats.UnparsedAction("this call of a tool cannot be read; write it again, as it was shown")

    def _record_parse_error(self, error: formats.UnparsedAction) -> None:
        self._parse_errors += 1
        self.rewards.append(0.0)
        reason = CUT_OFF if self.talk.cut_off else error
        self.talk.messages.append({"role": "user", "content": f"{self._format.mark}error: {reason}"})

    def see(self, step: Step) -> None:
        """Record the step result of an action from `decide` and show its observation to the agent. Raises SpecError for
        a new context."""
        refuse_new_context(step)
        self.rewards.append(step.reward)
        self.outcome = step.info
        self.done = step.done
        self.hear(step.observation)

    def hear(self, observation: Messages) -> None:
        """Show an observation to the agent, in a format with one action per message."""
        assert isinstance(self._format, formats.SingleActionFormat)
        self.talk.messages += self._format.show(self._cleaned(observation))

    def replace_observation(self, text: str) -> None:
        """Replace the text of the last message that the environment showed to the agent."""
        last = self.talk.messages[-1]
        mark = self._format.mark if last["content"].startswith(self._format.mark) else ""
        self.talk.messages[-1] = {**last, "content": f"{mark}{text}"}

    def _cleaned(self, messages: Messages) -> Messages:
        cleaned_messages, truncated = cleaned(messages, self._max_observation)
        self._truncated_observations += truncated
        return cleaned_messages

    def branch(self, request: EpisodeRequest) -> Episode:
        """Return a copy that continues as another episode, in an environment restored to this state."""
        branch = copy.copy(self)
        branch.request = request
        branch.talk, branch._format = self.talk.branch(request), copy.copy(self._format)
        branch.steps, branch.rewards = list(self.steps), list(self.rewards)
        return branch

    def trajectory(self) -> Trajectory:
        """Return the trajectory of the episode so far."""
        talk = self.talk
        talk.recorder.close(talk.messages)
        trajectory = replace(
            self.request.trajectory(talk.policy),
            histories=talk.recorder.histories,
            tools=talk.tools,
            step_rewards=self.rewards,
            outcome=self.outcome,
            metrics={
                "turns": float(talk.turns),
                "sampled_tokens": float(talk.sampled),
                MESSAGES: float(talk.truncated),
                **talk.usage.metrics(),
                "parse_errors": float(self._parse_errors),
                **{name: float(count) for name, count in self._format.counts.items()},
                **({"cut_observations": float(self._truncated_observations)} if self._truncated_observations else {}),
            },
            failure=self.failure,
        )
        limit = self.limit or (TURNS if talk.turns >= self.request.max_turns else None)
        return truncated_at(trajectory, limit) if limit and not self.done and not self.failure else trajectory


async def ask(
    method: Callable[[*Arguments], Any], *arguments: *Arguments, error: type[BoundaryError] = EnvironmentFailed
) -> Any:
    """Call a synchronous or async method and return its result. Its exceptions become `error`, or
    EnvironmentUnavailable if they are transient. Synchronous methods of an environment with the attribute `blocking`
    run in a thread."""
    name = getattr(method, "__name__", str(method))
    try:
        if getattr(getattr(method, "__self__", None), "blocking", False) and not inspect.iscoroutinefunction(method):
            answer = await in_thread(lambda: method(*arguments))
        else:
            answer = method(*arguments)
        return await answer if inspect.isawaitable(answer) else answer
    except BaseException as cause:
        if is_foreign(cause):
            log_traceback(cause)
        if not is_foreign(cause, BoundaryError):
            raise
        kind = EnvironmentUnavailable if error is EnvironmentFailed and passes(cause) else error
        cancelled = isinstance(cause, asyncio.CancelledError)
        text = "cancelled itself" if cancelled else described(cause)
        raise kind(f"{name}: {text}") from cause


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
    return Step(as_messages(step.observation, "step"), reward, bool(step.done), info, bool(step.new_context))


def refuse_new_context(step: Step) -> None:
    """Raise SpecError if the step begins a new context, in an episode of several conversations."""
    if step.new_context:
        text = "begins a new context within an episode; expected agent.roles=null and collect.opponent=environment"
        raise SpecError([Problem("environment", text)])


def as_json(data: Any, where: str) -> Any:
    """Return the data. Raises EnvironmentFailed if they cannot be serialized as JSON."""
    try:
        json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"{where} returned data that cannot be serialized as JSON: {error}") from None
    return data
