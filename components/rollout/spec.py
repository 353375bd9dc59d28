"""How episodes are collected."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from components.rollout.formats import Name
from components.sandbox import Limits
from components.specs import Spec, Target

GIVEN = ("scenario", "client", "base_url", "api_key", "model", "environment")
"""What an agent of one's own may ask for (`own_agent`)."""


class OwnAgentTarget(Target):
    called_with = GIVEN


class CodeSpec(Spec):
    """What a block of code may use that the agent writes."""

    seconds: float = Field(10.0, ge=0.1, le=600)
    """Of time, with the earlier blocks, which are carried out again; waiting for tools does not count."""
    memory_mb: int = Field(256, ge=32)
    """Of memory."""
    calls: int = Field(32, ge=1)
    """Calls of tools that one block may make; with one more it is ended."""
    output: int = Field(4000, ge=100)
    """Bytes that are shown of what it prints, and of its errors; of more, the middle is cut."""

    def limits(self) -> Limits:
        return Limits(
            seconds=self.seconds,
            cpu_seconds=int(self.seconds) + 1,
            memory_mb=self.memory_mb,
            processes=16,
            disk_mb=16,
            output_bytes=self.output,
            calls=self.calls,
        )


class AgentSpec(Spec):
    """The agent loop: one assistant message a turn."""

    format: Name = "native"
    """How actions are written. `native`: the message's own tool calls. `react`: Thought and Action as text
    (arXiv:2210.03629), tools in the system message. `chat`: what is said is the action, for environments of text.
    `code`: a block of Python in which the tools are functions (arXiv:2402.01030), run in the sandbox."""
    max_turns: int = Field(8, ge=1)
    """Most assistant messages of one episode; then it ends as it stands."""
    max_tokens: int = Field(128, ge=1)
    """Most sampled tokens of one message."""
    function: OwnAgentTarget | None = None
    """An agent of your own in place of the loop: a function, as `my_package.agents.mine` or with arguments; `max_turns`
    is then how many calls it may make. Its package must be in `allow`."""
    max_observation: int = Field(100_000, ge=100)
    """Most characters of one message of the environment; what is cut is marked and counted (`cut_observations`)."""
    code: CodeSpec | None = None
    """`{seconds: 10, memory_mb: 256, calls: 32, output: 4000}`: what a block of `format=code` may use: seconds of time
    (with the earlier blocks, which are carried out again), memory, calls of tools, and bytes of output that are shown.
    null for other formats; for `code` it means these."""

    @field_validator("function", mode="before")
    @classmethod
    def _written_short(cls, value: Any) -> Any:
        return {"_target_": value} if isinstance(value, str) else value

    def limits(self) -> Limits | None:
        """Of code; None where none is written."""
        return (self.code or CodeSpec()).limits() if self.format == "code" else None

    def shown_part(self) -> dict[str, Any]:
        """What determines how an episode is shown, for stage keys."""
        part: dict[str, Any] = {"format": self.format, "max_observation": self.max_observation}
        return part | ({"code": (self.code or CodeSpec()).model_dump()} if self.format == "code" else {})

    def key_part(self) -> dict[str, Any]:
        """What determines results, for stage keys."""
        data: dict[str, Any] = {"max_turns": self.max_turns, "max_tokens": self.max_tokens}
        return data | ({"function": self.function.resolved()} if self.function else self.shown_part())


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
    max_failures: float = Field(0.1, ge=0)
    """Below 1: share of the episodes that may fail; from 1: how many. More end the stage with an error."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that one episode may take; then it is a failed episode."""
