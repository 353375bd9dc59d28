"""Planner and worker: two roles of one policy in one episode, each with its own instructions and conversations.

The planner is shown the task, and what the worker's tools are. It says one sub-goal at a time, or `Answer: ...`, which
is what the environment is told. For each sub-goal a worker begins anew: it knows its instructions, the sub-goal and the
tools, and acts in the environment until it says what came of it; the planner is told that, or, where the worker has
used up its messages, what the environment said last.

Histories are those of the planner (agent `planner`), then those of the workers (`worker`), and both are trained by the
reward of the episode. Step rewards stand in the order of the histories, which is not that of time.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

from components.environments.protocol import Environment
from components.errors import EngineError, EnvironmentFailed
from components.inference.protocol import Engine, Sampling
from components.rollout import formats
from components.rollout.agent import MAX_OBSERVATION, Episode
from components.rollout.players.player import episode_number
from components.rollout.spec import RolesSpec
from components.trajectories.schema import Scenario, Trajectory

_ANSWER = re.compile(r"\s*Answer:(.*)", re.DOTALL)


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
    again: bool = False,
    roles: RolesSpec,
    format: formats.Name = "native",
    max_observation: int = MAX_OBSERVATION,
) -> Trajectory:
    """As `agent.play`. max_turns: of both roles together. format: how workers write their actions."""
    shown: dict[str, Any] = {"format": format, "max_observation": max_observation}
    planner = Episode(engine, environment, sampling, seed, max_observation=max_observation, agent="planner")
    workers: list[Episode] = []
    acted, unsaid = planner, 0
    async with planner.within(timeout, step_timeout, again):
        first, tools = await planner.start(scenario)
        rules = [one["content"] for one in first if one["role"] == "system"]
        task = [one for one in first if one["role"] != "system"]
        planner.open([_system(roles.planner, *_able(tools), *rules), *task], [])
        while not planner.done and (left := max_turns - _turns(planner, *workers)) > 0:
            said = (await planner.answer())["content"].strip()
            if answer := _ANSWER.fullmatch(said):
                planner.see(await planner.step({"role": "assistant", "content": answer[1].strip()}))
                acted = planner
                continue
            planner.rewards.append(0.0)
            if not said:
                unsaid += 1
                planner.hear([{"role": "user", "content": "error: say a sub-goal, or Answer: and your answer"}])
            elif left > 1:
                own = episode_number(seed, f"worker/{len(workers)}")
                worker = Episode(engine, environment, sampling, own, agent="worker", **shown)
                workers.append(worker)
                worker.open([_system(roles.worker, *rules), {"role": "user", "content": said}], tools)
                report = await _work(worker, min(roles.worker_turns, left - 1), planner)
                acted = worker if worker.steps else acted
                planner.done = worker.done
                planner.hear([{"role": "user", "content": report}])
    plan, *worked = (one.trajectory(scenario, sample) for one in (planner, *workers))
    metrics = Counter(plan.metrics)
    for one in worked:
        metrics.update(one.metrics)
    return replace(
        plan,
        histories=[history for one in (plan, *worked) for history in one.histories],
        tools=worked[0].tools if worked else [],
        step_rewards=[reward for one in (plan, *worked) for reward in one.step_rewards],
        outcome=acted.outcome,
        metrics={
            **metrics,
            "subgoals": float(len(workers)),
            "parse_errors": metrics["parse_errors"] + unsaid,
        },
    )


async def _work(worker: Episode, turns: int, watched: Episode) -> str:
    """Works on a sub-goal; what the planner is told of it. `watched` is told what is waited for."""
    while worker.talk.turns < turns and not worker.done:
        watched.awaited = EngineError
        action = await worker.decide()
        watched.awaited = EnvironmentFailed
        if action is None:
            continue
        if not action.get("tool_calls"):
            worker.rewards.append(0.0)
            return f"The worker says: {action['content']}"
        step = await watched.step(action)
        worker.steps.append((action, step))
        worker.see(step)
    return f"The worker has not said what came of it. Last it saw: {worker.talk.messages[-1]['content']}"


def _turns(*episodes: Episode) -> int:
    return sum(one.talk.turns for one in episodes)


def _able(tools: formats.Tools) -> list[str]:
    """What the planner is told of the worker's tools."""
    listed = [f"- {one['function']['name']}: {one['function'].get('description', '')}" for one in tools]
    return ["\n".join(["The worker has these tools:", *listed])] if listed else []


def _system(*parts: str) -> dict[str, Any]:
    return {"role": "system", "content": "\n\n".join(parts)}
