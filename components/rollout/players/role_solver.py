"""Demonstrations of planner and workers, from the solution that an environment gives for a single agent.

Each action of the solution is one sub-goal: the planner names it, a worker executes it and, if it may write another
message, reports what it saw. A message without tool calls is the planner's answer. The episode is played by the agent
itself (`roles`), so a demonstration is laid out as the policy's own episodes are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from components.environments.protocol import Environment, Messages, Solver
from components.errors import EnvironmentFailed
from components.inference.protocol import ChatCompletion, ChatRequest, Sampling
from components.rollout import formats
from components.rollout.agent import as_messages, ask
from components.rollout.players.roles import PlannerAndWorkers
from components.rollout.request import EpisodeRequest
from components.rollout.spec import RolesSpec
from components.rollout.tool_schemas import as_tools
from components.trajectories.parts import SOLVER
from components.trajectories.roles import PLANNER
from components.trajectories.schema import Scenario, Trajectory


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

    def load_policy(self, version: str, folder: str | None) -> None:
        """Do nothing: a solution has no weights."""

    def close(self) -> None:
        """Do nothing: no resources are held."""

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
