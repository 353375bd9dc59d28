"""Episodes of a custom agent: any function that uses an OpenAI-compatible endpoint.

    async def agent(scenario, client):                      # an openai.AsyncOpenAI; a plain function gets openai.OpenAI
        answer = await client.chat.completions.create(model="policy", messages=[...])
        return 1.0 if "..." in answer.choices[0].message.content else 0.0

The function's parameter names select its arguments: `scenario`, `client`, or `base_url`, `api_key` and `model` for
another library, process or language, `sample`, the index of the episode in its group, and `environment`, an exclusive
instance that it may reset and step. It returns

    a number       the episode's reward; the outcome is `{"reward": number}`
    a mapping      the episode's outcome, including `success`
    a Trajectory   its outcome, step rewards and metrics are used; its histories only if the endpoint was not called
    None           no outcome: the experiment's reward function scores the conversation

Calls of the endpoint are recorded as the trajectory (`capture`). Each episode has its own API key, which identifies its
calls; no library is patched. Each synchronous function runs in a thread; after a timeout, the thread is abandoned and
its calls are rejected. A process that an async function starts through asyncio is terminated at the end of the episode.
An exception of the agent fails the episode, unless its last call was refused because no calls remain or the prompt does
not fit the context: then the episode is truncated (`components.trajectories.truncation`). An agent may handle the
refusal itself: what it returns then stands. A response is recorded only if the agent received it: if its client cancels
the request, nothing is recorded, and a retry returns the same response.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from components.aio import ending_processes, in_thread
from components.environments.protocol import Environment, Step
from components.errors import (
    AgentError,
    BoundaryError,
    EnvironmentFailed,
    EnvironmentUnavailable,
    Problem,
    ResourceError,
    SpecError,
)
from components.exceptions import causes, is_foreign, log_traceback, place, status_of
from components.inference.protocol import Engine
from components.redaction import MASK
from components.rollout.agent import as_json, as_step
from components.rollout.capture import Capture
from components.rollout.request import EpisodeRequest
from components.rollout.spec import RUNTIME_ARGUMENTS
from components.trajectories.schema import Failure, History, Trajectory
from components.trajectories.truncation import MESSAGES

REFUSED = (400, 403)
"""HTTP statuses of a call beyond a limit: `components.errors.ContextOverflow` and `CallLimitReached`."""
_ERROR_LINE = re.compile(r"[\w.]{0,100}(Error|Exception)\b")
"""A line of standard error that names an error: in Python the last line, in Node the one before the stack."""
MODEL = "policy"
"""Served name of the policy."""
NO_CALL = (
    "the agent made no call of the policy that the endpoint recorded, so there is nothing to train on; create its "
    "client within the episode, with the base_url and api_key of the episode"
)


class OwnAgent:
    """Agent that runs `function`, as `players.player.Agent`. url: address of the endpoint, which looks up the engine of
    an API key in `engines`. Raises SpecError if the function has an unknown required parameter."""

    holds_environment = True

    def __init__(self, function: Callable[..., Any], url: str, engines: MutableMapping[str, Engine]):
        parameters = inspect.signature(function).parameters.values()
        required = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        ]
        if unknown := [name for name in required if name not in RUNTIME_ARGUMENTS]:
            text = f"asks for {', '.join(unknown)}; expected some of {', '.join(RUNTIME_ARGUMENTS)}"
            raise SpecError([Problem("agent.function", text)])
        self._names = [parameter.name for parameter in parameters if parameter.name in RUNTIME_ARGUMENTS]
        self.needs_environment = "environment" in self._names
        self._must_call = getattr(_plain(function), "must_call", False)
        self._function = function
        self._url = url
        self._engines = engines

    async def play(self, engine: Engine, environment: Environment | None, request: EpisodeRequest) -> Trajectory:
        """Play one episode and return its trajectory, with any failure recorded."""
        capture = Capture(engine, request.sampling, request.seed, request.max_turns)
        returned, failure, ended_by_limit = None, None, False
        with self._key(capture) as key:
            try:
                async with ending_processes(), asyncio.timeout(request.timeout):
                    returned = _validated(await self._run(request, environment, key))
            except BoundaryError as error:
                if request.raise_unreachable and isinstance(error, EnvironmentUnavailable):
                    raise
                ended_by_limit = isinstance(error, AgentError) and _was_refused(error.__cause__)
                if not (ended_by_limit and capture.limit):
                    failure = Failure(error.boundary, type(error).__name__, str(error).replace(key, MASK))
            except TimeoutError:
                text = f"the episode took longer than {request.timeout:g} s"
                failure = Failure(AgentError.boundary, "WaitTimeout", text)
            else:
                if getattr(self._function, "requires_calls", False) and not capture.calls:
                    text = "no call of the program reached the model: it made none, or the endpoint refused its form"
                    failure = Failure(AgentError.boundary, "AgentError", text)
        if isinstance(capture.failed, SpecError | ResourceError):
            raise capture.failed  # would fail every episode
        if isinstance(capture.failed, BoundaryError):
            failure = Failure.of(capture.failed, capture.failed.boundary)
        reported = returned if isinstance(returned, Trajectory) else None
        outcome = reported.outcome if reported else dict(returned) if isinstance(returned, Mapping) else {}
        if isinstance(returned, float):
            outcome = {"reward": returned}
        histories = capture.histories or (reported.histories if reported else [])
        if self._must_call and not histories and failure is None and not capture.calls and capture.limit is None:
            failure = Failure(AgentError.boundary, AgentError.__name__, NO_CALL)
        histories = histories or [History([])]
        return replace(
            request.trajectory(engine.policy),
            histories=histories,
            tools=capture.tools or (reported.tools if reported else []),
            step_rewards=reported.step_rewards if reported else [],
            outcome=outcome,
            metrics={
                **(reported.metrics if reported else {}),
                "turns": float(capture.answers),
                "sampled_tokens": float(capture.sampled),
                MESSAGES: float(capture.truncated),
                **({capture.limit: 1.0} if capture.limit and ended_by_limit and failure is None else {}),
                **({"constrained": float(capture.constrained)} if capture.constrained else {}),
                **capture.usage.metrics(),
                "histories": float(len(histories)),
            },
            failure=failure or (reported.failure if reported else None),
        )

    @contextmanager
    def _key(self, capture: Capture) -> Iterator[str]:
        """Register an API key for the episode within the block."""
        key = secrets.token_urlsafe(24)
        self._engines[key] = capture
        try:
            yield key
        finally:
            del self._engines[key]
            capture.close()

    async def _run(self, request: EpisodeRequest, environment: Environment | None, key: str) -> Any:
        function = inspect.unwrap(_plain(self._function))
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        available: dict[str, Any] = {"scenario": request.scenario, "sample": request.sample, "environment": environment}
        available |= {"base_url": self._url, "api_key": key, "model": MODEL}
        client = _client(self._url, key, is_async) if "client" in self._names else None
        arguments = {name: client if name == "client" else available[name] for name in self._names}
        try:
            result = self._function(**arguments) if is_async else await in_thread(lambda: self._function(**arguments))
            return await result if inspect.isawaitable(result) else result
        except BaseException as error:
            if not is_foreign(error, EnvironmentFailed):
                raise
            log_traceback(error)
            raise AgentError(_describe(error)) from error
        finally:
            if client is not None:
                closed = client.close()
                if inspect.isawaitable(closed):
                    await closed


def _was_refused(error: BaseException | None) -> bool:
    """Return True if the agent raised because a call was refused at a limit, by status or message. Any failed
    subprocess counts, because its cause is unknown."""
    return any(
        status_of(cause) in REFUSED
        or "agent.max_turns" in str(cause)
        or "context_length_exceeded" in str(cause)
        or isinstance(cause, subprocess.CalledProcessError)
        for cause in causes(error)
    )


def _describe(error: BaseException) -> str:
    """Return the description of an agent's exception. For a subprocess: its exit status and the error on standard
    error, without the command line, which may contain the episode's API key and a whole program."""
    text = str(error)
    if isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        program = error.cmd if isinstance(error.cmd, str) else str(error.cmd[0])
        program = program.split(maxsplit=1)[0] if program.split() else "the process"
        ended = f"exit code {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else "timed out"
        written = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        written_lines = [line.strip() for line in written.splitlines() if line.strip()]
        error_lines = [line for line in written_lines if _ERROR_LINE.match(line)]
        last = (error_lines or written_lines or [""])[-1]
        text = f"{program}: {ended}" + (f": {last}" if last else "")
    return f"{type(error).__name__}: {text}{place(error)}"


def _plain(function: Any) -> Any:
    """Return the function without a partial's configured arguments."""
    return getattr(function, "func", function)


def _client(url: str, key: str, is_async: bool) -> Any:
    """Return an OpenAI client. Raises ResourceError if the package is not installed."""
    try:
        import openai
    except ImportError:
        raise ResourceError(
            "agent.function has the parameter client, which needs the package openai: pip install openai, or use the "
            "parameters base_url and api_key"
        ) from None
    settings: dict[str, Any] = {"base_url": url, "api_key": key, "max_retries": 0}
    if is_async:  # trust_env=False: the endpoint is local, so proxies are bypassed
        return openai.AsyncOpenAI(**settings, http_client=openai.DefaultAsyncHttpxClient(trust_env=False))
    return openai.OpenAI(**settings, http_client=openai.DefaultHttpxClient(trust_env=False))


def _validated(returned: Any) -> Any:
    """Return the agent's result. Raises AgentError if it has an invalid type or value."""
    if returned is None:
        return None
    if isinstance(returned, Trajectory):
        _validated(returned.outcome)
        numbers = [*returned.step_rewards, *returned.metrics.values()]
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise AgentError(
                f"the agent returned step rewards or metrics that are not finite numbers: {numbers!r:.200}"
            )
        return returned
    if isinstance(returned, Mapping):
        try:
            return as_step(Step([], info=as_json(dict(returned), "the agent"))).info
        except BoundaryError as error:
            raise AgentError(str(error)) from None
    try:
        number = float(returned)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(returned, str) or not math.isfinite(number):
        raise AgentError(
            f"the agent returned {returned!r:.200}; expected a finite number, a mapping, a Trajectory or nothing"
        )
    return number
