"""Examples: the content of one row in the words of trajectories.

A row gives one example: a task with one or more candidates, which are conversations with a reward. A conversation or a
completion is one candidate, a preference pair two, a ranked list as many as it has entries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from components.trajectories.parts import IMPORTED
from components.trajectories.reasoning import THINK
from components.trajectories.schema import History, Message, Scenario, Score, Trajectory
from components.trajectories.step_labels import written

STEP_LABELS = "labelled"
"""Head that learns the labels of imported turns, as in the reward `labelled`."""


class RowProblem(ValueError):
    """Row that gives no example. `check` names the check that it fails; `fits` is True if it has the form, and only its
    content is wrong."""

    def __init__(self, reason: str, check: str = "malformed", *, fits: bool = False):
        super().__init__(reason)
        self.check = check
        self.fits = fits or check == "empty"


@dataclass(slots=True)
class Candidate:
    """One conversation of an example, with its reward."""

    histories: list[History]
    """Conversation; several histories only in data that a run produced."""
    reward: float | None = 1.0
    """Reward; None for an unscored episode."""
    step_rewards: list[float] = field(default_factory=list)
    """Reward of each assistant message; empty without rewards."""
    step_labels: dict[str, list[float]] = field(default_factory=dict)
    """Labels of each assistant message by the head of a process reward model that learns them."""
    name: str = ""
    """Id of the trajectory in the source; empty without an id."""
    tokenizer: str = ""
    """Digest of the tokenizer of the token ids; empty without them."""
    components: dict[str, float] = field(default_factory=dict)
    """Values by name besides the reward, which the heads of a reward model learn."""

    @property
    def messages(self) -> list[Message]:
        """Messages of all histories."""
        return [message for history in self.histories for message in history.messages]

    def drop_tokens(self) -> None:
        """Leave the messages, which the training tokenizes."""
        for history in self.histories:
            history.token_ids, history.logprobs = [], []
        for message in self.messages:
            message.span = None
        self.tokenizer = ""


@dataclass(slots=True)
class DataExample:
    """Content of one row."""

    candidates: list[Candidate]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Available tools, in OpenAI's JSON format."""
    name: str = ""
    """Id of the task in the source; empty without an id."""
    type: str = ""
    """Task type."""
    difficulty: int = 0
    """Difficulty from 1 to 5; 0 means unknown."""
    input: dict[str, Any] = field(default_factory=dict)
    """Columns of the row that are not part of the conversation; JSON data."""
    missing: dict[str, str] = field(default_factory=dict)
    """Reasons by what a log lacks for this conversation: `token_ids`, `errors`."""
    group: str = ""
    """Id of a scenario that several rows share; empty: the row has a scenario of its own."""

    def prompt(self) -> list[tuple[str, str]]:
        """Return the roles and texts before the first trained message."""
        shown: list[tuple[str, str]] = []
        for message in self.candidates[0].messages:
            if message.role == "assistant" and message.trained:
                break
            shown.append((message.role, message.content))
        return shown

    def calls_unlisted_tools(self) -> bool:
        """Return True if a message calls a tool, and there is no list of tools."""
        return not self.tools and any(message.tool_calls for it in self.candidates for message in it.messages)

    def place_reasoning(self, place: Literal["field", "text", "drop"]) -> None:
        """Leave the reasoning of all messages as it is, write it in front of their content, or remove it."""
        for candidate in self.candidates:
            for message in candidate.messages:
                if message.reasoning is not None and place != "field":
                    if place == "text":
                        message.content = THINK.write(message.reasoning, message.content)
                    message.reasoning = None
                    candidate.drop_tokens()

    def shared_scenario(self) -> str:
        """Return the id of the scenario that the row shares with others: `group`, or that of all single answers with
        its name and its prompt; empty without one."""
        if self.group or not self.name or len(self.candidates) > 1:
            return self.group
        prompt = json.dumps(self.prompt()).encode()
        return f"{self.name.replace('~', '-')}~{hashlib.blake2b(prompt, digest_size=6).hexdigest()}"

    def content(self) -> bytes:
        """Return everything that training reads, as canonical text: equal examples have equal content."""
        parts: list[Any] = [self.tools]
        for candidate in self.candidates:
            components = [candidate.components] if candidate.components else []
            parts.append([candidate.reward, candidate.step_rewards, candidate.step_labels, *components])
            for message in candidate.messages:
                calls = [(call.name, call.arguments) for call in message.tool_calls]
                parts.append([message.role, message.content, message.reasoning, calls, message.trained])
        return json.dumps(parts).encode()

    def text(self) -> str:
        """Return the text of user and assistant messages, for the comparison of similar examples."""
        return "\n".join(
            " ".join(
                [
                    *([message.reasoning] if message.reasoning else []),
                    message.content,
                    *(f"{call.name} {call.arguments}" for call in message.tool_calls),
                ]
            )
            for candidate in self.candidates
            for message in candidate.messages
            if message.role in ("user", "assistant")
        )

    def scored(self, number: int, split: str) -> Iterator[tuple[Trajectory, Score]]:
        """Yield the trajectories with their scores. number: number of the row in its source, which makes ids unique."""
        name = self.shared_scenario() or "~".join(filter(None, (self.name.replace("~", "-"), f"row-{number}")))
        scenario = Scenario(name, self.input, split, self.type, self.difficulty)
        for sample, candidate in enumerate(self.candidates):
            alone = not candidate.name and not self.shared_scenario()
            own = f"{name}/{sample}" if alone else f"{candidate.name or name}~row-{number}"
            trajectory = Trajectory(
                *(own, scenario, sample, candidate.histories, self.tools),
                outcome=_outcome(candidate),
                policy=IMPORTED,
                sampling={"tokenizer": candidate.tokenizer} if candidate.tokenizer else {},
            )
            components = dict(candidate.components)
            for head, labels in candidate.step_labels.items():
                components |= written(head, labels)
            yield trajectory, Score(own, candidate.reward, components, list(candidate.step_rewards))


def _outcome(candidate: Candidate) -> dict[str, Any]:
    return {"success": candidate.reward is not None and candidate.reward > 0.5}
