"""The trajectory schema, in plain Python dataclasses.

A trajectory is one episode. It consists of one or more histories. A history is a linear conversation with the exact
token stream that the model read and sampled. A new history begins where the next prompt does not extend the tokens so
far (a sub-agent, a compacted context, a chat template that rewrites earlier messages), so training uses only tokens
that the policy sampled.

The collect stage writes no rewards: the judge stage adds them (`components.trajectories.store.load_scored` joins both).
Wall-clock times are stored beside the trajectories, not in them: equal episodes are equal data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from components.errors import EspalierError
from components.exceptions import place
from components.redaction import mask_text

SCHEMA_VERSION = 1

Role = Literal["system", "user", "assistant", "tool"]
VOCABULARY = "vocabulary:"
"""Beginning of the digest of a tokenizer without its chat template (`Trajectory.sampling`)."""


@dataclass(slots=True, frozen=True)
class Scenario:
    """A task instance."""

    id: str
    """Identifier, unique in its environment and identical on every machine."""
    input: dict[str, Any]
    """Task parameters for the environment's reset; JSON data."""
    split: str
    """`train` or `heldout` (an environment may add others). Splits are disjoint."""
    type: str = ""
    """Task type, for reports by type."""
    difficulty: int = 0
    """Difficulty from 1 (easy), in most environments to 5 (hard); 0 means unknown."""


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A tool call by the model."""

    id: str
    name: str
    arguments: str
    """Arguments as JSON text of a mapping. The token stream has the text that the model sampled."""


@dataclass(slots=True)
class Message:
    """A message of a conversation, in OpenAI's terms."""

    role: Role
    content: str
    """Text; empty if the message only calls tools."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Tool calls of an assistant message."""
    tool_call_id: str | None = None
    """For role `tool`: id of the call that this message responds to."""
    span: tuple[int, int] | None = None
    """Range [start, end) of this message's tokens in the history's token stream: sampled ones, and those that ended its
    reasoning (`Sampling.max_thinking_tokens`), whose log-probability is NaN. None if the message was not
    sampled by an engine (user, tool, system, demonstrations)."""
    finish_reason: str | None = None
    """Finish reason of a sampled message: `stop`, `tool_calls` or `length`; `paused` if its sampling was interrupted
    and continues in a later round (`components.rollout.players.partial`)."""
    trained: bool = True
    """False for an assistant message that is context only and never trained on: in imported data, or a response that is
    no sample of the policy's own distribution, because its form was enforced."""
    reasoning: str | None = None
    """Reasoning of an assistant message before its content, without the marks around it; None if there is none."""


@dataclass(slots=True)
class History:
    """A linear conversation and its exact tokens."""

    messages: list[Message]
    token_ids: list[int] = field(default_factory=list)
    """(T,) token stream: prompts and sampled responses, in order. Empty for demonstrations."""
    logprobs: list[float] = field(default_factory=list)
    """(T,) natural log-probability of each token under the distribution that it was sampled from (after temperature and
    truncation); NaN if the token was not sampled. NaN is data and is preserved in storage."""
    agent: str = "main"
    """Name of the agent. Sub-agents and compacted contexts have separate histories."""

    def sampled_mask(self) -> list[bool]:
        """Return a (T,) mask, True for sampled tokens, except those of messages that are never trained on."""
        mask = [False] * len(self.token_ids)
        for message in self.messages:
            if message.span is not None and message.trained:
                start, end = message.span
                logprobs = self.logprobs[start:end] or [math.nan] * (end - start)
                added = [math.isnan(logprob) for logprob in logprobs]
                mask[start:end] = [all(added) or not is_added for is_added in added]  # all: the sampler is unknown
        return mask

    def targets(self) -> list[int]:
        """Return the indices of the tokens to train on, those of `sampled_mask`."""
        return [index for index, is_sampled in enumerate(self.sampled_mask()) if is_sampled]


@dataclass(slots=True, frozen=True)
class Failure:
    """Cause of an episode's failure, recorded instead of a zero reward."""

    boundary: str
    """Boundary that failed: `engine`, `environment`, `agent` or `judge`; for a score also `people` (no human
    feedback)."""
    kind: str
    """Class name of the error."""
    message: str
    """Error text with secrets masked: servers may repeat a rejected API key."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", mask_text(self.message))

    @classmethod
    def of(cls, error: BaseException, boundary: str) -> Failure:
        """Return the failure that records an error. Exceptions outside Espalier's own tree name the line of the user's
        code that raised them."""
        where = "" if isinstance(error, EspalierError) else place(error)
        return cls(boundary, type(error).__name__, f"{error}{where}")


@dataclass(slots=True)
class Trajectory:
    """An episode."""

    id: str
    """Identifier, unique in its artifact: derived from scenario and sample, never random."""
    scenario: Scenario
    sample: int
    """Index of the episode in its group, from 0."""
    histories: list[History]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Available tools, in OpenAI's JSON format."""
    step_rewards: list[float] = field(default_factory=list)
    """Reward of each step by the environment; after scores are joined, the judge's step rewards if it gives any."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """Final report of the environment: `success` (bool) and any other values; JSON data."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics such as turns, sampled_tokens, invalid_actions."""
    failure: Failure | None = None
    """Cause of failure; None if the episode ended normally."""
    policy: str = ""
    """Version of the acting policy, the first one of several: a digest, or for demonstrations `solver`, `teacher`,
    `correction` or `imported`."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters: temperature, top_p, top_k, min_p, seed. For a teacher and a served policy also `tokenizer`:
    digest of the tokenizer that the token ids belong to (`VOCABULARY`). For an episode that several policies played
    also `versions` (`components.trajectories.versions`)."""
    reward: float | None = None
    """Final reward by the judge; None before judging, or if the episode could not be scored."""
    advantage: float | None = None
    """Advantage, set by the training algorithm; None before."""

    @property
    def group(self) -> str:
        """Group key: the trajectories of one scenario form a group."""
        return self.scenario.id

    @property
    def success(self) -> bool:
        """True if the environment reported success; False for a failed episode."""
        return self.failure is None and bool(self.outcome.get("success", False))


@dataclass(slots=True, frozen=True)
class Score:
    """The judge's score of one trajectory."""

    trajectory_id: str
    reward: float | None
    """Reward; None means unscored because the judge or the episode failed. Never replaced by zero."""
    components: dict[str, float] = field(default_factory=dict)
    """Parts of a composed reward by name. A judge's named value for turn i is `NAME/i`."""
    step_rewards: list[float] = field(default_factory=list)
    """Reward of each turn, if the judge scores turns; replaces the environment's step rewards in training."""
    explanation: str = ""
    """Explanation by the judge."""
    cost: float | None = 0.0
    """Cost of judging this trajectory, in the currency of the configured prices; None if a price is unknown. Cached
    responses count at their original cost."""
    failure: Failure | None = None


KEPT = "kept"
"""Reason of every selection that keeps its trajectory, and of no other."""
FAILED = "failed"
"""Reason of every selection that drops a failed episode. All built-in filters drop failed episodes."""
UNSCORED = "unscored"
"""Reason of every selection that drops a finished episode without a reward. All built-in filters
drop such episodes."""


@dataclass(slots=True, frozen=True)
class Selection:
    """The filter's decision about one trajectory."""

    trajectory_id: str
    kept: bool
    """True if the trajectory is used for training."""
    reason: str
    """Reason: `kept`, or the name of the rule that dropped the trajectory."""
