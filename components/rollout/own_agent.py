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
are told apart; nothing is patched. Plain functions run in threads. An agent that raises has failed; one that has used
up its calls is at its end.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from components.environments.protocol import Environment
from components.errors import AgentError, BoundaryError, EngineError, Problem, ResourceError, SpecError
from components.inference.protocol import Engine, Sampling
from components.rollout.agent import as_json
from components.rollout.capture import Capture
from components.rollout.spec import GIVEN
from components.trajectories.schema import Failure, History, Scenario, Trajectory

MODEL = "policy"
"""Name under which the policy is asked for."""


class OwnAgent:
    """Plays with `function`. url: of the endpoint, which asks `engines` for the engine that belongs to a key. threads:
    most plain functions at once. Raises SpecError where the function asks for what it cannot be given."""

    def __init__(
        self,
        function: Callable[..., Any],
        url: str,
        engines: MutableMapping[str, Engine],
        *,
        threads: int,
    ):
        parameters = inspect.signature(function).parameters.values()
        required = [one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
        if unknown := [name for name in required if name not in GIVEN]:
            raise SpecError(
                [Problem("agent.function", f"asks for {', '.join(unknown)}; expected some of {', '.join(GIVEN)}")]
            )
        self._names = [one.name for one in parameters if one.name in GIVEN]
        self._function = function
        self._url = url
        self._engines = engines
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="agent")

    def close(self) -> None:
        """Threads that still run end by themselves: their calls are refused."""
        self._pool.shutdown(wait=False, cancel_futures=True)

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
    ) -> Trajectory:
        """One episode; what fails is in it. Cancellation, SpecError and ResourceError pass through."""
        capture = Capture(engine, sampling, seed, max_turns)
        returned, failure = None, None
        with self._key(capture) as key:
            try:
                async with asyncio.timeout(timeout):
                    returned = await self._run(scenario, environment, key)
                returned = _checked(returned)
            except BoundaryError as error:
                if not capture.exhausted:
                    failure = Failure(error.boundary, type(error).__name__, str(error))
            except TimeoutError:
                failure = Failure("agent", "WaitTimeout", f"the episode took longer than {timeout:g} s")
        told = returned if isinstance(returned, Trajectory) else None
        outcome = told.outcome if told else dict(returned) if isinstance(returned, Mapping) else {}
        if isinstance(returned, float):
            outcome = {"reward": returned}
        histories = capture.recorder.histories or (told.histories if told else []) or [History([])]
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
                "turns": float(capture.calls),
                "sampled_tokens": float(capture.sampled),
                "truncated": float(capture.truncated),
                "histories": float(len(histories)),
            },
            failure=failure,
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
        awaited = inspect.iscoroutinefunction(inspect.unwrap(_plain(self._function)))
        given: dict[str, Any] = {"scenario": scenario, "base_url": self._url, "api_key": key, "model": MODEL}
        given["environment"] = environment
        client = _client(self._url, key, awaited) if "client" in self._names else None
        arguments = {name: client if name == "client" else given[name] for name in self._names}
        try:
            if awaited:
                return await self._function(**arguments)
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._pool, lambda: self._function(**arguments))
            return await found if inspect.isawaitable(found) else found
        except (SpecError, ResourceError, EngineError):
            raise
        except asyncio.CancelledError:
            raise
        except (Exception, SystemExit) as error:
            raise AgentError(f"{type(error).__name__}: {error}") from error
        finally:
            if client is not None:
                closed = client.close()
                if inspect.isawaitable(closed):
                    await closed


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
    return (openai.AsyncOpenAI if awaited else openai.OpenAI)(base_url=url, api_key=key, max_retries=0)


def _checked(returned: Any) -> Any:
    """What the agent returned, if it is one of what it may return; else AgentError."""
    if returned is None or isinstance(returned, Trajectory):
        return returned
    if isinstance(returned, Mapping):
        try:
            return as_json(dict(returned), "the agent")
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
