"""Episodes of an agent of one's own: any function that talks to an OpenAI-compatible endpoint.

    async def agent(scenario, client):                      # an openai.AsyncOpenAI; a plain function gets openai.OpenAI
        answer = await client.chat.completions.create(model="policy", messages=[...])
        return 1.0 if "..." in answer.choices[0].message.content else 0.0

It is given what its parameters name: `scenario`, `client`, or `base_url`, `api_key` and `model` for another library,
process or language, and `environment`, one of its own that it may reset and step. It returns

    a number       the episode's reward, outcome `{"reward": number}`
    a mapping      the episode's outcome, `success` among it
    a Trajectory   its outcome, step rewards and metrics; its histories where nothing was said through the endpoint
    None           nothing: the reward of the experiment looks at what was said

What it says through the endpoint is the trajectory (`capture`). Each episode has a key of its own, by which its calls
are told apart; nothing is patched. Plain functions run in a thread each; one that runs out of time is left behind, and
its calls are refused. A process that an async function starts through asyncio ends with the episode at the latest. An
agent that raises has failed; one that raises because it has used up its calls is at its end. An answer counts that the
agent was sent: where its client gave up waiting, nothing is recorded, and asking again gives the same.
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
from dataclasses import asdict
from typing import Any

from components.aio import ending_processes, in_thread
from components.environments.protocol import Environment, Step
from components.errors import (
    AgentError,
    BoundaryError,
    EnvironmentAway,
    EnvironmentFailed,
    Problem,
    ResourceError,
    SpecError,
)
from components.exceptions import causes, status_of
from components.inference.protocol import Engine, Sampling
from components.redaction import MASK
from components.rollout.agent import as_json, as_step
from components.rollout.capture import Capture
from components.rollout.spec import RUNTIME_ARGUMENTS
from components.trajectories.schema import Failure, History, Scenario, Trajectory

REFUSED = 403
"""Status of HTTP of a call that an episode has no more (`components.errors.CallsUsedUp`)."""
_ERROR_LINE = re.compile(r"[\w.]{0,100}(Error|Exception)\b")
"""A line of a process's standard error that names an error: of Python the last one, of Node before the stack."""
MODEL = "policy"
"""Name under which the policy is asked for."""


class OwnAgent:
    """Plays with `function`. url: of the endpoint, which asks `engines` for the engine that belongs to a key. Raises
    SpecError where the function asks for what it cannot be given."""

    def __init__(
        self,
        function: Callable[..., Any],
        url: str,
        engines: MutableMapping[str, Engine],
    ):
        parameters = inspect.signature(function).parameters.values()
        required = [one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
        if unknown := [name for name in required if name not in RUNTIME_ARGUMENTS]:
            raise SpecError(
                [Problem("agent.function", f"asks for {', '.join(unknown)}; expected some of {', '.join(RUNTIME_ARGUMENTS)}")]
            )
        self._names = [one.name for one in parameters if one.name in RUNTIME_ARGUMENTS]
        self.wants_environment = "environment" in self._names
        self._function = function
        self._url = url
        self._engines = engines

    async def play(
        self,
        engine: Engine,
        environment: Environment | None,
        scenario: Scenario,
        *,
        sample: int,
        sampling: Sampling,
        max_turns: int,
        seed: int,
        timeout: float | None,
        again: bool = False,
    ) -> Trajectory:
        """One episode; what fails is in it. Cancellation, SpecError and ResourceError pass through, and with `again`
        EnvironmentAway, for the episode to be played again."""
        capture = Capture(engine, sampling, seed, max_turns)
        returned, failure = None, None
        with self._key(capture) as key:
            try:
                async with ending_processes(), asyncio.timeout(timeout):
                    returned = _checked(await self._run(scenario, environment, key))
            except _Raised as error:
                cause = error.__cause__
                if not (capture.exhausted and _was_refused(cause)):
                    failure = Failure("agent", "AgentError", _words(cause).replace(key, MASK))
            except BoundaryError as error:
                if again and isinstance(error, EnvironmentAway):
                    raise
                failure = Failure(error.boundary, type(error).__name__, str(error))
            except TimeoutError:
                failure = Failure("agent", "WaitTimeout", f"the episode took longer than {timeout:g} s")
        if isinstance(capture.failed, SpecError | ResourceError):
            raise capture.failed  # would fail every episode alike, whatever the agent makes of it
        if isinstance(capture.failed, BoundaryError):
            failure = Failure(capture.failed.boundary, type(capture.failed).__name__, str(capture.failed))
        told = returned if isinstance(returned, Trajectory) else None
        outcome = told.outcome if told else dict(returned) if isinstance(returned, Mapping) else {}
        if isinstance(returned, float):
            outcome = {"reward": returned}
        histories = capture.histories or (told.histories if told else []) or [History([])]
        return Trajectory(
            id=f"{scenario.id}/{sample}",
            scenario=scenario,
            sample=sample,
            histories=histories,
            tools=capture.tools or (told.tools if told else []),
            step_rewards=told.step_rewards if told else [],
            outcome=outcome,
            metrics={
                **(told.metrics if told else {}),
                "turns": float(capture.answers),
                "sampled_tokens": float(capture.sampled),
                "truncated": float(capture.truncated),
                "histories": float(len(histories)),
            },
            failure=failure or (told.failure if told else None),
            policy=engine.policy,
            sampling={**asdict(sampling), "seed": seed},
        )

    @contextmanager
    def _key(self, capture: Capture) -> Iterator[str]:
        """A key that is good for one episode."""
        key = secrets.token_urlsafe(24)
        self._engines[key] = capture
        try:
            yield key
        finally:
            del self._engines[key]
            capture.close()

    async def _run(self, scenario: Scenario, environment: Environment | None, key: str) -> Any:
        function = inspect.unwrap(_plain(self._function))
        awaited = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        given: dict[str, Any] = {"scenario": scenario, "base_url": self._url, "api_key": key, "model": MODEL}
        given["environment"] = environment
        client = _client(self._url, key, awaited) if "client" in self._names else None
        arguments = {name: client if name == "client" else given[name] for name in self._names}
        try:
            found = self._function(**arguments) if awaited else await in_thread(lambda: self._function(**arguments))
            return await found if inspect.isawaitable(found) else found
        except (SpecError, ResourceError, EnvironmentFailed):
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _Raised from error  # a task of its own that it cancelled
        except (Exception, SystemExit) as error:
            raise _Raised from error
        finally:
            if client is not None:
                closed = client.close()
                if inspect.isawaitable(closed):
                    await closed


class _Raised(Exception):
    """The agent raised; what, is the cause."""


def _was_refused(error: BaseException | None) -> bool:
    """Whether an agent raised because a further call was refused: with its status or its words. Of a process of its own
    that ended nothing else is known."""
    return any(
        status_of(one) == REFUSED or "agent.max_turns" in str(one) or isinstance(one, subprocess.CalledProcessError)
        for one in causes(error)
    )


def _words(error: BaseException | None) -> str:
    """Return what an agent raised. Of a process: how it ended and the error that it wrote to standard error. Not its
    command line, which may hold the key of the episode and a whole program."""
    text = str(error)
    if isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        program = error.cmd if isinstance(error.cmd, str) else str(error.cmd[0])
        program = program.split(maxsplit=1)[0] if program.split() else "the process"
        ended = f"exit code {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else "timed out"
        written = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        written_lines = [line.strip() for line in written.splitlines() if line.strip()]
        named = [line for line in written_lines if _ERROR_LINE.match(line)]
        last = (named or written_lines or [""])[-1]
        text = f"{program}: {ended}" + (f": {last}" if last else "")
    return f"{type(error).__name__}: {text}"


def _plain(function: Any) -> Any:
    """Without the arguments that a config has filled."""
    return getattr(function, "func", function)


def _client(url: str, key: str, awaited: bool) -> Any:
    try:
        import openai
    except ImportError:
        raise ResourceError(
            "agent.function asks for a client of the package openai, which is not installed: pip install openai, or "
            "let it take base_url and api_key"
        ) from None
    settings: dict[str, Any] = {"base_url": url, "api_key": key, "max_retries": 0}
    if awaited:  # the endpoint is on this machine: no proxy is asked
        return openai.AsyncOpenAI(**settings, http_client=openai.DefaultAsyncHttpxClient(trust_env=False))
    return openai.OpenAI(**settings, http_client=openai.DefaultHttpxClient(trust_env=False))


def _checked(returned: Any) -> Any:
    """What the agent returned, if it is one of what it may return; else AgentError."""
    if returned is None:
        return None
    if isinstance(returned, Trajectory):
        _checked(returned.outcome)
        numbers = [*returned.step_rewards, *returned.metrics.values()]
        if not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
            raise AgentError(f"the agent returned step rewards or metrics that are no finite numbers: {numbers!r:.200}")
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
