"""The trajectory schema: what one episode is, in plain Python.

A trajectory is one episode. It holds one or more histories: a history is a linear conversation together with the
exact token stream that the model saw and sampled. A new history begins where the next prompt does not extend the
tokens so far (a sub-agent, a compacted context, a chat template that rewrites the past), so nothing is ever trained
on tokens that the policy did not sample.

Rewards are not written by collect: judge adds them (`components.trajectories.store.load_scored` joins them on).
Wall-clock times live beside the trajectories, not in them: equal episodes are equal data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from components.redaction import mask_text

SCHEMA_VERSION = 1

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(slots=True, frozen=True)
class Scenario:
    """One task instance."""

    id: str
    """Unique in its environment, the same on every machine."""
    input: dict[str, Any]
    """What the environment needs to set the task up; JSON data."""
    split: str
    """`train` or `heldout` (an environment may add others); splits share no scenario."""
    type: str = ""
    """Kind of task, for reports by type."""
    difficulty: int = 0
    """1 (easy) to 5 (hard); 0 means not stated."""


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str
    name: str
    arguments: str
    """JSON text of a mapping. What the model really wrote is in the token stream."""


@dataclass(slots=True)
class Message:
    """One message of a conversation, in OpenAI's terms."""

    role: Role
    content: str
    """Text; empty where the message only calls tools."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls made by an assistant message."""
    tool_call_id: str | None = None
    """For role `tool`: the call that this answers."""
    span: tuple[int, int] | None = None
    """Where the sampled tokens of this message lie in the history's token stream: [start, end). None where the
    message was not sampled by a model under our eyes (user, tool, system, demonstrations)."""
    finish_reason: str | None = None
    """`stop`, `tool_calls` or `length` for sampled messages."""


@dataclass(slots=True)
class History:
    """A linear conversation and its exact tokens."""

    messages: list[Message]
    token_ids: list[int] = field(default_factory=list)
    """The stream of T tokens: prompts and sampled answers, in order. Empty for demonstrations."""
    logprobs: list[float] = field(default_factory=list)
    """(T,) natural log-probability of each token under the distribution it was sampled from (after temperature and
    truncation); NaN where the token was not sampled. NaN is data and survives storage."""
    agent: str = "main"
    """Which agent spoke: sub-agents and compacted contexts have histories of their own."""

    def sampled_mask(self) -> list[bool]:
        """(T,) True where the policy sampled the token."""
        mask = [False] * len(self.token_ids)
        for message in self.messages:
            if message.span is not None:
                start, end = message.span
                mask[start:end] = [True] * (end - start)
        return mask


@dataclass(slots=True, frozen=True)
class Failure:
    """Why an episode did not run to its end. Never a silent zero reward."""

    boundary: str
    """`engine`, `environment`, `agent` or `judge`; of a score also `people`, who said nothing."""
    kind: str
    """Class name of the error."""
    message: str
    """Text of the error, its secrets masked: servers repeat the keys that they refuse."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", mask_text(self.message))


@dataclass(slots=True)
class Trajectory:
    """One episode."""

    id: str
    """Unique in its artifact: derived from scenario and sample, never random."""
    scenario: Scenario
    sample: int
    """Which of the group's episodes this is, from 0."""
    histories: list[History]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools offered, in OpenAI's JSON form."""
    step_rewards: list[float] = field(default_factory=list)
    """What the environment gave at each step; once scores are joined on, what the judge gave where it gave any."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """What the environment said at the end: `success` (bool) and whatever else it reports; JSON data."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts such as turns, sampled_tokens, invalid_actions."""
    failure: Failure | None = None
    policy: str = ""
    """Version of the policy that acted: a digest, or for demonstrations `solver`, `teacher` or `correction`."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters in force: temperature, top_p, top_k, min_p, seed. Of a teacher also `tokenizer`: the digest
    of the one whose token ids these are."""
    reward: float | None = None
    """Final reward by the judge; None before judging and where it could not be scored."""
    advantage: float | None = None
    """Set by an algorithm; None before."""

    @property
    def group(self) -> str:
        """Trajectories of one scenario form a group."""
        return self.scenario.id

    @property
    def success(self) -> bool:
        """Whether the environment called the episode a success; False for a failed episode."""
        return self.failure is None and bool(self.outcome.get("success", False))


@dataclass(slots=True, frozen=True)
class Score:
    """What judge says of one trajectory."""

    trajectory_id: str
    reward: float | None
    """None means unscored: the judge or the episode failed. Never replaced by zero."""
    components: dict[str, float] = field(default_factory=dict)
    """Each part of a composed reward by name. What a judge says of turn i under a name of its own is `NAME/i`."""
    step_rewards: list[float] = field(default_factory=list)
    """Of each turn, where the judge scores turns; they replace the environment's for training."""
    explanation: str = ""
    cost: float | None = 0.0
    """What judging this trajectory costs, in the currency of the prices; None where a price is not known. The same
    whether it was paid now or an answer was kept from before."""
    failure: Failure | None = None


@dataclass(slots=True, frozen=True)
class Selection:
    """What filter decided about one trajectory."""

    trajectory_id: str
    kept: bool
    reason: str
    """Why: `kept`, or the name of the rule that dropped it."""
