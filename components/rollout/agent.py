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
import inspect
import json
import math
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, get_args

from components.environments.protocol import Environment, Messages, Step
from components.errors import BoundaryError, EngineError, EnvironmentFailed, ResourceError, SpecError
from components.inference.protocol import ChatRequest, Engine, Sampling
from components.rollout import formats
from components.rollout.observations import cleaned
from components.rollout.offered import as_tools
from components.rollout.recorder import Recorder
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
    format: formats.Name = "native",
    max_observation: int = MAX_OBSERVATION,
) -> Trajectory:
    """Plays one episode with the policy that the engine holds.

    timeout: seconds that it may take. A failure of engine or environment, and running out of time, is recorded in the
    trajectory, with what was said until then; cancellation passes through. format: how actions are written.
    max_observation: most characters of one message of the environment; the rest is cut, and the message says so.
    """
    policy = engine.policy
    recorder = Recorder()
    messages: Messages = []
    rewards: list[float] = []
    outcome: dict[str, Any] = {}
    failure = None
    tools: list[dict[str, Any]] = []
    turns = sampled = truncated = unread = cut = 0
    shown = formats.make(format)
    awaited: type[BoundaryError] = EnvironmentFailed
    try:
        async with asyncio.timeout(timeout):
            tools = as_tools(await ask(environment.tools))
            first, cut = cleaned(as_messages(await ask(environment.reset, scenario), "reset"), max_observation)
            opening, tools = shown.opening(first, tools)
            messages += opening
            for turn in range(max_turns):
                request = ChatRequest(list(messages), tools, policy, sampling, seed=seed * 1009 + turn)
                awaited = EngineError
                completion = await ask(engine.chat, request, error=EngineError)
                awaited = EnvironmentFailed
                recorder.record(messages, completion)
                messages.append(completion.message)
                turns, sampled = turns + 1, sampled + len(completion.token_ids)
                truncated += completion.finish_reason == "length"
                try:
                    action = shown.read(completion.message)
                except formats.Unreadable as error:
                    unread += 1
                    rewards.append(0.0)
                    messages.append({"role": "user", "content": f"Observation: error: {error}"})
                    continue
                step = as_step(await ask(environment.step, action))
                rewards.append(step.reward)
                outcome = step.info
                observation, more = cleaned(step.observation, max_observation)
                cut += more
                messages += shown.show(observation)
                if step.done:
                    break
    except BoundaryError as error:
        failure = Failure(error.boundary, type(error).__name__, str(error))
    except TimeoutError:
        text = (
            f"the episode took longer than {timeout:g} s (timeout of this stage), last it waited for the "
            f"{awaited.boundary}"
        )
        failure = Failure(awaited.boundary, "WaitTimeout", text)
    recorder.close(messages)
    return Trajectory(
        id=f"{scenario.id}/{sample}",
        scenario=scenario,
        sample=sample,
        histories=recorder.histories,
        tools=tools,
        step_rewards=rewards,
        outcome=outcome,
        metrics={
            "turns": float(turns),
            "sampled_tokens": float(sampled),
            "truncated": float(truncated),
            **({"parse_errors": float(unread)} if format != "native" else {}),
            **({"cut_observations": float(cut)} if cut else {}),
        },
        failure=failure,
        policy=policy,
        sampling={**asdict(sampling), "seed": seed},
    )


async def ask(method: Callable[..., Any], *arguments: Any, error: type[BoundaryError] = EnvironmentFailed) -> Any:
    """Calls a method, plain or async; what it raises becomes `error`. Plain methods of an environment that says that
    they take long (`blocking`) run in a thread."""
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
        raise error(f"{name}: {type(cause).__name__}: {cause}") from cause


async def in_thread(work: Callable[[], Any]) -> Any:
    """The result of `work`, in a thread of its own that nobody waits for where this is cancelled: it may never end, and
    must hold up neither the engine's passes nor the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:  # a future does not take this one
            future.set_exception(RuntimeError("StopIteration") if isinstance(error, StopIteration) else error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001  whatever it is, it is raised where it is waited for
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="episode").start()
    return await future


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
