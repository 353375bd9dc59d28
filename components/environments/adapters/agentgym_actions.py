"""Formats of actions for AgentGym's environments: as the agent writes them, and as each server reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from components.environments.tools import ACT, InvalidAction

FORMATS = {
    "react": "Say what you think, then what you do, once:\nThought: ...\nAction: ...",
    "tool": f"Act by the tool {ACT.name}.",
    "plain": "Answer with the action and nothing else.",
}
ACTION = re.compile(r"^[ \t]*Action:", re.MULTILINE)
NEXT = re.compile(r"^[ \t]*(?:Observation|Thought):", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Action:
    """A parsed action of an agent, with the thought before it."""

    text: str
    thought: str = ""


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


# As the servers read them


def first_line(action: Action) -> str:
    """Return the first non-empty line; later lines are commentary."""
    lines = [line.strip() for line in action.text.splitlines() if line.strip()]
    if not lines:
        raise InvalidAction("there is no action")
    return lines[0]


def _fenced(text: str) -> str:
    """Return the content of the first code fence, or the whole text if there is none."""
    _, fence, tail = text.partition("```")
    if not fence:
        return text.strip()
    return re.sub(r"\A[A-Za-z]*(?=[ \t]*\n)|\Asql\b", "", tail.partition("```")[0]).strip()


def sql(action: Action) -> str:
    if statement := _fenced(action.text):
        return statement
    raise InvalidAction("there is no SQL")


def browser_command(action: Action) -> str:
    """Return the command in a code fence: the server reads the first code fence."""
    if command := first_line(Action(_fenced(action.text))):
        return f"```{command}```"
    raise InvalidAction("there is no action")


def function_call(action: Action) -> str:
    """Return the call on one line after `Action:`, which the server reads to the end of the line."""
    text = " ".join(action.text.split("\n")).strip().removeprefix("Action:").strip()
    if not re.match(r"\w+\s+with\s+Action Input:", text):
        raise InvalidAction("expected NAME with Action Input: {...}")
    return f"Action: {text}"


def craft(action: Action) -> str:
    """Return the action reduced to letters, digits and commas, which the server accepts."""
    return " ".join(re.sub(r"[^A-Za-z0-9, ]+", " ", first_line(action)).split())


def move(action: Action) -> str:
    text = first_line(action).lower()
    return f"move {text}" if text in ("up", "down", "left", "right") else text


def spaced_word(action: Action) -> str:
    """Return the word as letters separated by spaces, as the server expects it."""
    text = "".join(first_line(action).lower().split())
    if not re.fullmatch("[a-z]{5}", text):
        raise InvalidAction("expected one word of five letters")
    return " ".join(text)


def tagged(action: Action) -> str:
    """Return the tagged action with its thought; the server penalizes an action without a thought."""
    if not any(_closed(action.text, name) for name in ("search", "answer")):
        raise InvalidAction("expected <search>...</search> or <answer>...</answer>")
    return f"<think>{action.thought}</think>\n{action.text}" if action.thought else action.text


def _closed(text: str, tag: str) -> bool:
    """Return True if the tag is opened and closed later."""
    start = text.find(f"<{tag}>")
    return start >= 0 and text.find(f"</{tag}>", start) >= 0
