"""Formats of actions for AgentGym's environments."""

from __future__ import annotations

import re

from components.environments.adapters.agentgym_kinds import Action
from components.environments.tools import ACT, InvalidAction

FORMATS = {
    "react": "Say what you think, then what you do, once:\nThought: ...\nAction: ...",
    "tool": f"Act by the tool {ACT.name}.",
    "plain": "Answer with the action and nothing else.",
}
ACTION = re.compile(r"^[ \t]*Action:", re.MULTILINE)
NEXT = re.compile(r"^[ \t]*(?:Observation|Thought):", re.MULTILINE)


def parse_action(text: str) -> Action | None:
    """Parse `Thought: ...` and `Action: ...`; return None if there is no action.

    Observations and thoughts that the agent invents after its action are dropped. Raises InvalidAction for several
    actions.
    """
    text = text.strip().removesuffix("</s>").rstrip()
    matches = list(ACTION.finditer(text))
    if len(matches) > 1 and not NEXT.search(text, matches[0].end(), matches[1].start()):
        raise InvalidAction("one action at a time: write Action: once")
    if matches:
        thought, action = text[: matches[0].start()], text[matches[0].end() :]
    else:
        thought, colon, action = text.rpartition("Action:")
        if not colon:
            return None
    if end := NEXT.search(action):
        action = action[: end.start()]
    return Action(action.strip(), thought.strip().removeprefix("Thought:").strip())


def storable(text: str) -> str:
    """Replace unpaired surrogates, which can be stored neither in a request nor in a file."""
    return text.encode("utf-8", "replace").decode("utf-8")
