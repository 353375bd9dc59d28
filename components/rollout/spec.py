"""How episodes are collected."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from components.rollout.formats import Name
from components.specs import Spec, Target

GIVEN = ("scenario", "client", "base_url", "api_key", "model", "environment")
"""What an agent of one's own may ask for (`own_agent`)."""


PATIENCE = {"concurrency", "environments", "timeout", "step_timeout", "retries"}
"""Keys of collect and evaluate that say how much at once and how patiently, and are in no stage's key."""


class OwnAgentTarget(Target):
    called_with = GIVEN


class AgentSpec(Spec):
    """The agent loop: one assistant message a turn."""

    format: Name = "native"
    """How actions are written. `native`: the message's own tool calls. `react`: Thought and Action as text
    (arXiv:2210.03629), tools in the system message. `chat`: what is said is the action, for environments of text."""
    max_turns: int = Field(8, ge=1)
    """Most assistant messages of one episode; then it ends as it stands."""
    max_tokens: int = Field(128, ge=1)
    """Most sampled tokens of one message."""
    function: OwnAgentTarget | None = None
    """An agent of your own in place of the loop: a function, as `my_package.agents.mine` or with arguments; `max_turns`
    is then how many calls it may make. Its package must be in `allow`."""
    max_observation: int = Field(100_000, ge=100)
    """Most characters of one message of the environment; what is cut is marked and counted (`cut_observations`)."""

    @field_validator("function", mode="before")
    @classmethod
    def _written_short(cls, value: Any) -> Any:
        return {"_target_": value} if isinstance(value, str) else value

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys."""
        data = self.model_dump(mode="json", exclude={"function"})
        return data | ({"function": self.function.resolved()} if self.function else {})


class CollectSpec(Spec):
    scenarios: int = Field(8, ge=1)
    """Scenarios of one round, drawn without repetition from the train split until it is used up, then again."""
    group_size: int = Field(6, ge=1)
    """Episodes of each scenario."""
    refills: int = Field(0, ge=0)
    """Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): where the filter left fewer scenarios than the round has, as
    many others are played, judged and filtered, at most so many times a round."""
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by it; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Tokens are drawn from the smallest set that has this mass; 1 means all."""
    top_k: int = Field(0, ge=0)
    """0 means no limit."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Tokens with less than this share of the likeliest one's probability are not drawn."""
    concurrency: int = Field(64, ge=1)
    """Episodes in flight at once; the engine batches their requests."""
    environments: int | None = Field(None, ge=1)
    """Most instances of the environment at once; further episodes wait for one. None: one for each episode, or as many
    as the environment says (`instances`)."""
    max_failures: float = Field(0.1, ge=0)
    """Below 1: share of the episodes that may fail; from 1: how many. More end the stage with an error. Cancelled ones
    count for nothing."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that one episode may take; then it is a failed episode."""
    step_timeout: float | None = Field(None, gt=0)
    """Seconds that the environment may take for one step, or to reset; then it is a failed episode. An agent of your
    own asks its environment itself: `timeout` holds for it. None: no limit but `timeout`."""
    retries: int = Field(2, ge=0)
    """How often an episode is played again, with the same seed, whose environment was away: nobody listened, the line
    broke, HTTP 429, 502, 503 or 504. What else fails is never played again."""
