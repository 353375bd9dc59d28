"""Planner and worker: two roles of one policy in one episode, each with its own instructions and conversations.

The planner reads the task and a list of the worker's tools. It writes one sub-goal at a time, or `Answer: ...`, which
goes to the environment. Each sub-goal starts a new worker, whose conversation has its instructions, the sub-goal and
the tools. The worker acts in the environment until it reports a result. The planner reads that report or, if the worker
has used up its messages, the last observation.

The histories are the planner's (agent `planner`), then the workers' (`worker`); the episode's reward trains both, or a
reward of its own each (`reward=by_role` with `algorithm.credit=roles`). Step
rewards follow the order of the histories, not the chronological order.

A demonstration is made of the solution that an environment gives for a single agent: each action is one sub-goal, which
the planner names and a worker executes and, if it may write another message, reports. A message without tool calls is
the planner's answer. The agent itself plays it, so a demonstration is laid out as the policy's own episodes are.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from components.environments.protocol import Environment, Messages, Solver
from components.errors import EngineError, EnvironmentFailed
from components.inference.protocol import ChatCompletion, ChatRequest, Engine, Sampling
from components.rollout import formats
from components.rollout.agent import Episode, as_messages, ask
from components.rollout.formats import Presentation, Tools
from components.rollout.request import EpisodeRequest, derived_seed
from components.rollout.spec import RolesSpec
from components.rollout.tool_schemas import as_tools
from components.trajectories.parts import SOLVER
from components.trajectories.roles import PLANNER, WORKER
from components.trajectories.schema import Scenario, Trajectory
from components.trajectories.truncation import TURNS, truncated_at

_ANSWER = re.compile(r"\s*Answer:(.*)", re.DOTALL)


class PlannerAndWorkers:
    """An agent of two roles, as `players.player.Agent`. presentation: applies to the workers. `request.max_turns`
    limits the total messages of both roles."""

    needs_environment = True
    holds_environment = False

    def __init__(self, presentation: Presentation, spec: RolesSpec):
        self._presentation = presentation
        self._spec = spec

    async def play(self, engine: Engine, environment: Environment, request: EpisodeRequest) -> Trajectory:
        """Play one episode and return its trajectory."""
        own = Presentation(max_observation=self._presentation.max_observation)
        planner = Episode(engine, environment, request, own, agent=PLANNER)
        workers: list[Episode] = []
        last_actor, empty_messages = planner, 0
        async with planner.within():
            first, tools = await planner.start()
            rules = [message["content"] for message in first if message["role"] == "system"]
            task = [message for message in first if message["role"] != "system"]
            planner.open([_system(self._spec.planner, *_tool_list(tools), *rules), *task], [])
            while not planner.done:
                remaining = request.max_turns - _turns(planner, *workers)
                if remaining <= 0:
                    planner.limit = TURNS
                    break
                text = (await planner.answer())["content"].strip()
                if answer := _ANSWER.fullmatch(text):
                    planner.see(await planner.step({"role": "assistant", "content": answer[1].strip()}))
                    last_actor = planner
                    continue
                planner.rewards.append(0.0)
                if not text:
                    empty_messages += 1
                    planner.hear(
                        [{"role": "user", "content": "error: state a sub-goal, or write Answer: and the answer"}]
                    )
                elif remaining > 1:
                    subgoal = replace(request, seed=derived_seed(request.seed, f"worker/{len(workers)}"))
                    worker = Episode(engine, environment, subgoal, self._presentation, agent=WORKER)
                    workers.append(worker)
                    worker.open([_system(self._spec.worker, *rules), {"role": "user", "content": text}], tools)
                    report = await _work(worker, min(self._spec.worker_turns, remaining - 1), planner)
                    last_actor = worker if worker.steps else last_actor
                    planner.done = worker.done
                    planner.hear([{"role": "user", "content": report}])
        plan, *subgoals = (episode.trajectory() for episode in (planner, *workers))
        metrics = Counter(plan.metrics)
        for trajectory in subgoals:
            metrics.update(trajectory.metrics)
        trajectory = replace(
            plan,
            histories=[history for part in (plan, *subgoals) for history in part.histories],
            tools=subgoals[0].tools if subgoals else [],
            step_rewards=[reward for part in (plan, *subgoals) for reward in part.step_rewards],
            outcome=last_actor.outcome,
            metrics={
                **metrics,
                "subgoals": float(len(workers)),
                "parse_errors": metrics["parse_errors"] + empty_messages,
            },
        )
        return truncated_at(trajectory, planner.limit) if planner.limit else trajectory


async def _work(worker: Episode, turns: int, watched: Episode) -> str:
    """Run a worker on its sub-goal and return the report for the planner. `watched.awaited` names the awaited
    boundary."""
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
    return f"The worker sent no report. Its last observation: {worker.talk.messages[-1]['content']}"


def _turns(*episodes: Episode) -> int:
    return sum(episode.talk.turns for episode in episodes)


def _tool_list(tools: Tools) -> list[str]:
    """Return the planner's description of the worker's tools."""
    listed = [f"- {tool['function']['name']}: {tool['function'].get('description', '')}" for tool in tools]
    return ["\n".join(["The worker has these tools:", *listed])] if listed else []


def _system(*parts: str) -> dict[str, Any]:
    return {"role": "system", "content": "\n\n".join(parts)}


async def demonstrate_roles(
    environment: Environment, solver: Solver, scenario: Scenario, presentation: formats.Presentation, roles: RolesSpec
) -> Trajectory:
    """Return the solution of a scenario as an episode of planner and workers. Raises EnvironmentFailed if the
    environment fails."""
    engine = _SolverEngine(environment, solver, scenario, presentation, roles)
    request = EpisodeRequest(scenario=scenario, sample=0, seed=0, sampling=Sampling(), max_turns=await engine.turns())
    episode = await PlannerAndWorkers(presentation, roles).play(engine, environment, request)
    if episode.failure is not None:
        raise EnvironmentFailed(f"the solution of {scenario.id} failed: {episode.failure.message}")
    histories = [
        replace(history, messages=[replace(message, finish_reason=None) for message in history.messages])
        for history in episode.histories
    ]
    metrics = {"turns": episode.metrics["turns"], "subgoals": episode.metrics["subgoals"]}
    return replace(episode, histories=histories, metrics=metrics, policy=SOLVER, sampling={})


def subgoal(action: dict[str, Any], tools: formats.Tools) -> str:
    """Return the sub-goal that asks for an action: the text of an action in an environment of text, else the name of
    each tool with its arguments."""
    calls = [call["function"] for call in action["tool_calls"]]
    text_tool = formats.text_tool(tools)
    if text_tool is not None:
        return "; ".join(str(json.loads(call["arguments"])[text_tool[1]]) for call in calls)
    return "; ".join(
        f"{call['name']}: {', '.join(f'{name} {value}' for name, value in json.loads(call['arguments']).items())}"
        for call in calls
    )


class _SolverEngine:
    """Engine that answers as planner and as worker with the actions of a solution, without tokens."""

    policy = SOLVER

    def __init__(
        self,
        environment: Environment,
        solver: Solver,
        scenario: Scenario,
        presentation: formats.Presentation,
        roles: RolesSpec,
    ):
        self._environment, self._solver, self._scenario = environment, solver, scenario
        self._format = formats.make(presentation.format, presentation.limits)
        self._roles = roles
        self._actions: Messages = []
        self._delegated: dict[str, Any] = {}
        self._tools: formats.Tools | None = None

    async def turns(self) -> int:
        """Read the solution, and return the number of its messages of both roles."""
        self._actions = as_messages(await ask(self._solver.solve, self._scenario), "solve")
        return sum(1 + min(self._roles.worker_turns, 2) if _calls(action) else 1 for action in self._actions)

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the next message of the role whose conversation this is."""
        if self._tools is None:
            self._tools = as_tools(await ask(self._environment.tools))
            self._format.opening([], self._tools)
        message = self._message(request.agent, request.messages, self._tools)
        return ChatCompletion(message, "stop", [], [], [], self.policy)

    def _message(self, agent: str, messages: Sequence[dict[str, Any]], tools: formats.Tools) -> dict[str, Any]:
        answered = any(message["role"] == "assistant" for message in messages)
        if agent == PLANNER:
            action = self._actions.pop(0)
            self._delegated = action
            text = subgoal(action, tools) if _calls(action) else f"Answer: {action.get('content') or ''}"
            return {"role": "assistant", "content": text}
        if not answered:
            return self._format.write(self._delegated)
        report = messages[-1]["content"].removeprefix(self._format.mark)
        return self._format.write({"role": "assistant", "content": report})


def _calls(action: dict[str, Any]) -> list[dict[str, Any]]:
    return action.get("tool_calls") or []
