"""Protocol of action formats: presentation of tools to an agent, and parsing of its messages into actions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from components.environments.protocol import Messages, Step
from components.inference.protocol import ChatCompletion
from components.trajectories.call_forms import attempts_call

Tools = list[dict[str, Any]]
Take = Callable[[dict[str, Any]], Awaitable[Step]]
"""Executes an action as an environment step; the observation is cleaned for display."""


class UnparsedAction(Exception):
    """A response without a valid action. The agent reads the exception's text."""


class Format(Protocol):
    """An action format, with the state of one episode."""

    mark: str
    """Prefix of observations that are not the environment's own messages."""

    counts: dict[str, int]
    """Counters of the format, for the episode's metrics."""

    def opening(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        """Return the initial messages and the tools to pass to the engine. Raises SpecError for tools that the format
        cannot express."""
        ...

    async def act(self, message: dict[str, Any], take: Take) -> Step:
        """Execute the action of an assistant message and return the step, its observation formatted for the agent.
        Raises UnparsedAction."""
        ...

    def write(self, action: dict[str, Any]) -> dict[str, Any]:
        """Return the assistant message that expresses an action, for demonstrations."""
        ...


def is_invalid_call(completion: ChatCompletion, tools: Tools) -> bool:
    """Return True for a response that is meant as a call of an offered tool and has none that can be read."""
    if completion.invalid_call is not None or completion.message.get("tool_calls"):
        return bool(completion.invalid_call)
    return attempts_call(completion.message.get("content") or "", tools)


def append_system_text(messages: Messages, text: str) -> Messages:
    """Return the messages with `text` appended to the system message, or as a new system message."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
