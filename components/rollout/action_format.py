"""The protocol of action formats: how an agent is shown tools, and how its messages become actions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from components.environments.protocol import Messages, Step

Tools = list[dict[str, Any]]
Take = Callable[[dict[str, Any]], Awaitable[Step]]
"""Carries out an action: a step of the environment, its observation fit to be shown."""


class Unreadable(Exception):
    """An answer that says no action; the message is what the agent is told."""


class Format(Protocol):
    mark: str
    """What an observation begins with that is not the environment's own message."""

    counts: dict[str, int]
    """What the format counts, for the metrics of the episode."""

    def opening(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        """What is shown first, and the tools that the engine is told of. Raises SpecError for tools that cannot be
        written so."""
        ...

    async def act(self, message: dict[str, Any], take: Take) -> Step:
        """Does what an assistant message says; the observation is as the agent is shown it. Raises Unreadable."""
        ...

    def write(self, action: dict[str, Any]) -> dict[str, Any]:
        """The assistant message that stands for an action: what a demonstration shows."""
        ...


def told_first(messages: Messages, said: str) -> Messages:
    """The messages, with something more said by the system."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{said}"}, *messages[1:]]
    return [{"role": "system", "content": said}, *messages]
