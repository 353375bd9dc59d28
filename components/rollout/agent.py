"""The agent loop: native tool calls.

The model is shown the conversation, its answer goes to the environment, the observation is appended; until the
environment is done, or the turns are used up. A truncated answer is an action like any other: the environment says
what it thinks of it.
"""

from __future__ import annotations

import inspect
from typing import Any

from components.environments.protocol import Environment, Step
from components.errors import BoundaryError, EnvironmentFailed, EspalierError
from components.inference.protocol import ChatRequest, Engine, Sampling
from components.rollout.recorder import Recorder
from components.trajectories.schema import Failure, Scenario, Trajectory


async def play(
    engine: Engine,
    environment: Environment,
    scenario: Scenario,
    *,
    sample: int,
    sampling: Sampling,
    max_turns: int,
    seed: int,
) -> Trajectory:
    """Plays one episode with the policy that the engine holds. A failure of engine or environment is recorded in the
    trajectory, with what was said until then; cancellation passes through."""
    policy = engine.policy
    recorder = Recorder()
    messages: list[dict[str, Any]] = []
    rewards: list[float] = []
    outcome: dict[str, Any] = {}
    failure = None
    tools: list[dict[str, Any]] = []
    turns = sampled = truncated = 0
    try:
        tools = await _ask(environment.tools)
        messages = list(await _ask(environment.reset, scenario))
        for turn in range(max_turns):
            request = ChatRequest(list(messages), tools, policy, sampling, seed=seed * 1009 + turn)
            completion = await engine.chat(request)
            recorder.record(messages, completion)
            messages.append(completion.message)
            turns, sampled = turns + 1, sampled + len(completion.token_ids)
            truncated += completion.finish_reason == "length"
            step = await _ask(environment.step, completion.message)
            if not isinstance(step, Step):
                raise EnvironmentFailed(f"step returned {type(step).__name__}, expected Step")
            rewards.append(float(step.reward))
            outcome = step.info
            messages.extend(step.observation)
            if step.done:
                break
    except BoundaryError as error:
        failure = Failure(error.boundary, type(error).__name__, str(error))
    recorder.close(messages)
    return Trajectory(
        id=f"{scenario.id}/{sample}",
        scenario=scenario,
        sample=sample,
        histories=recorder.histories,
        tools=tools,
        step_rewards=rewards,
        outcome=outcome,
        metrics={"turns": float(turns), "sampled_tokens": float(sampled), "truncated": float(truncated)},
        failure=failure,
        policy=policy,
        sampling={
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "seed": seed,
        },
    )


async def _ask(method, *arguments):
    """Calls a method of an environment, plain or async; what it raises becomes EnvironmentFailed."""
    try:
        answer = method(*arguments)
        return await answer if inspect.isawaitable(answer) else answer
    except EspalierError:
        raise
    except Exception as error:
        raise EnvironmentFailed(f"{getattr(method, '__name__', method)}: {type(error).__name__}: {error}") from error
