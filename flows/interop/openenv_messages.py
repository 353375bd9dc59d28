"""Messages of OpenEnv's protocol (openenv 0.10), as they are sent: actions, observations, states, errors.

Actions have one of these forms; metadata is accepted and not used:

    {"message": "text"}                                                  a message without tool calls
    {"type": "call_tool", "tool_name": "lookup", "arguments": {...}}     one tool call, as MCP environments have it
    {"tool_calls": [...], "message": "text"}                             an assistant message in OpenAI's format
    {"type": "list_tools"}                                               the tools; no step
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flows.interop import actions
from flows.interop.episode import Start, Transition
from flows.interop.sessions import Session


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextAction(_Message):
    """Action of an environment without tools: a message."""

    message: str = Field(description="the action, or what the agent says")
    metadata: dict[str, Any] = {}


class AnyAction(_Message):
    """Action of an environment with tools: a tool call, several ones, or a message."""

    type: Literal["call_tool", "list_tools"] | None = Field(None, description="list_tools returns the tools")
    tool_name: str | None = Field(None, description="name of the tool to call")
    arguments: dict[str, Any] = Field({}, description="arguments of the tool")
    message: str | None = Field(None, description="what the agent says, without a tool call; many episodes end with it")
    tool_calls: list[dict[str, Any]] | None = Field(None, description="several calls in OpenAI's format, as one step")
    metadata: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_form(self) -> AnyAction:
        fields = [name for name in ("tool_name", "message", "tool_calls") if getattr(self, name) is not None]
        expected = "expected message, or tool_name with arguments, or tool_calls"
        if self.type == "list_tools":
            if fields:
                raise ValueError(f"list_tools takes no {fields[0]}")
        elif self.type == "call_tool" and self.tool_name is None:
            raise ValueError("call_tool has no tool_name")
        elif not fields:
            raise ValueError(f"no action; {expected}")
        elif "tool_name" in fields and len(fields) > 1:
            raise ValueError(f"{' and '.join(fields)} together; {expected}")
        elif self.arguments and self.tool_name is None:
            raise ValueError("arguments without tool_name")
        return self

    def action(self) -> actions.Action:
        """Return the action in OpenAI's format. Raises InvalidRequest."""
        if self.tool_name is not None:
            return actions.tool_calls([(self.tool_name, self.arguments)])
        return actions.from_message({"content": self.message, "tool_calls": self.tool_calls})


class ResetData(_Message):
    """Arguments of a reset."""

    seed: int | None = Field(None, ge=0, description="index of the scenario, modulo their number; missing: 0")
    episode_id: str | None = Field(
        None,
        max_length=255,
        description="over HTTP: an episode to restart, by the id that its reset returned; over a WebSocket: a name",
    )
    scenario: str | None = Field(None, description="id of the scenario, in place of a seed")


class StepBody(_Message):
    """Body of POST /step."""

    action: dict[str, Any]
    episode_id: str = Field(max_length=255, description="id that the reset returned")
    timeout_s: float | None = Field(None, gt=0, le=86_400, description="time limit of this step in seconds")
    request_id: str | None = Field(None, max_length=255)


class Observation(BaseModel):
    """Observation. `text` after a message; `tool_name` and `result` after a tool call; `tools` for list_tools."""

    text: str | None = Field(None, description="the environment's messages as text")
    tool_name: str | None = None
    result: str | None = Field(None, description="result of the tool, also if it reports an error")
    error: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None


class StateData(BaseModel):
    """State of a session."""

    episode_id: str | None = None
    step_count: int = 0
    scenario: str | None = Field(None, description="id of the scenario")
    done: bool = False
    reward: float = Field(0.0, description="sum of the rewards so far")


def started(start: Start, episode_id: str) -> dict[str, Any]:
    """Return the result of a reset."""
    scenario = start.scenario
    metadata = {
        "episode_id": episode_id,
        "scenario": scenario.id,
        "type": scenario.type,
        "difficulty": scenario.difficulty,
        "messages": start.messages,
        "tools": start.tools,
    }
    return {"observation": {"text": start.text}, "reward": None, "done": False, "metadata": metadata}


def stepped(action: AnyAction, transition: Transition) -> dict[str, Any]:
    """Return the result of a step."""
    observation: dict[str, Any] = {"text": transition.text}
    if action.tool_name is not None:
        observation = {"tool_name": action.tool_name, "result": transition.text, "error": None}
    metadata = {
        "messages": transition.messages,
        "info": transition.info,
        "truncated": transition.truncated,
        "new_context": transition.new_context,
    }
    return {"observation": observation, "reward": transition.reward, "done": transition.done, "metadata": metadata}


def listed(tools: list[dict[str, Any]], done: bool) -> dict[str, Any]:
    """Return the result of the action list_tools."""
    return {"observation": {"tools": mcp_tools(tools)}, "reward": None, "done": done}


def mcp_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's format as MCP tools."""
    return [
        {
            "name": tool["function"]["name"],
            "description": tool["function"].get("description", ""),
            "input_schema": tool["function"].get("parameters") or {"type": "object"},
        }
        for tool in tools
    ]


def state(session: Session | None) -> dict[str, Any]:
    """Return the state of a session; that of no episode for None."""
    if session is None or session.start is None:
        return StateData().model_dump()
    episode = session.episode
    return StateData(
        episode_id=session.episode_id,
        step_count=episode.steps,
        scenario=session.start.scenario.id,
        done=episode.done,
        reward=episode.total,
    ).model_dump()


def validation_errors(error: Any) -> list[dict[str, Any]]:
    """Return the problems of a pydantic error as JSON data."""
    return list(json.loads(error.json(include_url=False, include_context=False)))
